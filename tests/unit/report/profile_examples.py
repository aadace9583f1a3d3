"""A profile result built by hand: no torch, no engine."""

from harness.results.profile import (
    BoundBy,
    Ceilings,
    Frame,
    MemoryPoint,
    MemoryTimeline,
    OperatorCount,
    Overhead,
    Percentiles,
    PhaseProfile,
    ProfileResult,
    RooflinePoint,
    StepShape,
    TableRow,
)


def timeline(name: str = "apply_rotary") -> MemoryTimeline:
    """Return three changes: 1 MiB more, another one, one gone."""
    stacks = ((Frame(filename="rotary.py", line=51, name=name),), (Frame(filename="", line=0, name="aten::mul"),))
    sizes = [(0.0, 2, None), (500.0, 3, 0), (1000.0, 4, 1), (2000.0, 3, 1)]
    points = tuple(
        MemoryPoint(
            time_us=time_us,
            allocated_bytes=size << 20,
            by_category=(1 << 20, 1 << 20, (size - 2) << 20, 0, 0),
            stack=stack,
        )
        for time_us, size, stack in sizes
    )
    return MemoryTimeline(points=points, stacks=stacks, peak=points[2], num_allocations=2, num_frees=1, num_kept=1)


def row(name: str, share: float) -> TableRow:
    return TableRow(name=name, calls=3, total_us=2000 * share, self_us=2000 * share, share=share)


def phase(name: str = "prefill", operation: str = "attention") -> PhaseProfile:
    rows = (row("self_attn.q_proj", 0.3), row(operation, 0.6), row("unattributed", 0.1))
    point = RooflinePoint(
        name=name, flops=10**8, bytes_moved=10**7, time_us=2000.0, intensity=10.0, bound_by=BoundBy.COMPUTE
    )
    return PhaseProfile(
        name=name,
        steps=(StepShape(phase="prefill", query_lens=(128,), context_lens=(128,), num_sampled=1),),
        wall_ms=2.0,
        trace_wall_ms=2.5,
        attributed_share=0.9,
        flops_measured=10**8,
        flops_formula=10**8,
        bytes_formula=10**7,
        kv_bytes_measured=196608,
        kv_bytes_formula=196608,
        peak_bytes=4 << 20,
        bytes_allocated=2 << 20,
        num_python_calls=270,
        mfu=0.2,
        mbu=0.1,
        bound_by=BoundBy.COMPUTE,
        counts=(
            OperatorCount(
                operation=operation,
                operator="aten::mm",
                count=3,
                flops=10**8,
                elementwise_flops=0,
                bytes_moved=10**6,
                bytes_allocated=10**6,
            ),
        ),
        layers=rows,
        operations=rows,
        operators=(row("aten::mm", 0.9),),
        roofline=(point,),
        memory=timeline(operation),
        traces=(f"trace/reference-{name}-r0.1.pt.trace.json.gz",),
        snapshot=f"memory/reference-{name}-r0.pickle",
    )


def profile(*phases: PhaseProfile) -> ProfileResult:
    latency = Percentiles(median=2.0, p90=2.5, p99=3.0, num_samples=5)
    return ProfileResult(
        engine="reference",
        model="/checkpoints/qwen3-tiny",
        dtype="float32",
        device="cpu",
        batch_size=1,
        num_prompt_tokens=128,
        max_new_tokens=32,
        ttft_ms=latency,
        tpot_ms=latency,
        inter_token_ms=None,
        tokens_per_second=735.0,
        phases=phases or (phase(),),
        overhead=Overhead(trace=2.5, memory=2.2, counters=9.6),
        ceilings=Ceilings(copy_bytes_per_s=4e10, matmul_flops_per_s=2e11),
        environment=(("torch", "2.13.0"), ("gpu", "")),
    )
