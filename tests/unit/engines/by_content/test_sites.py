"""Places in a step have the same name in every step."""

import threading
from dataclasses import replace

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from harness.engines.by_content.steps import ARGUMENTS, MODULE, RETURNED, Lookup, SiteWatcher


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.scale = nn.Identity()

    def forward(self, x):
        for _ in range(2):
            x = self.shared(x) + 1
        x.mul_(2)
        return self.scale(x), x.view(-1)


def watched(model, x, only=None):
    seen = []
    names = {module: path for path, module in model.named_modules()} if isinstance(model, nn.Module) else {}
    with torch.no_grad(), SiteWatcher(names, lambda *shown: seen.append(shown), only=only) as watcher:
        watcher.returned(model(x))
    return seen


def test_each_place_has_one_name_whatever_the_rows():
    model = Step()
    few, many = ([site for site, _ in watched(model, torch.ones(rows, 3))] for rows in (2, 5))
    assert few == many
    assert len(set(few)) == len(few)
    named = [(site.path, site.call, site.what) for site in few]
    assert named.count(("shared", 0, MODULE)) == named.count(("shared", 1, MODULE)) == 1
    adds = [site for site in few if site.what == "aten.add.Tensor"]
    assert [site.repeat for site in adds] == [0, 1]
    assert adds[0].line.startswith(f"{__file__}:")


def test_what_is_written_into_is_shown_with_its_new_value_and_views_are_not():
    model, x = Step(), torch.ones(2, 3)
    seen = watched(model, x)
    written = next(tensor for site, tensor in seen if site.what == "aten.mul_.Tensor")
    assert torch.equal(written, model(x)[0])
    assert not any(site.what == "aten.view.default" for site, _ in seen)
    assert [site.place for site, _ in seen if site.what == RETURNED] == [0, 1]


def test_code_in_a_folder_called_torch_is_the_engines():
    """Their lines would be those of the caller, in which prefill and decode differ."""
    file, names = "/site-packages/recurrentgemma/torch/layers.py", {}
    exec(compile("\n\ndef scaled(x):\n    return x * 2\n", file, "exec"), names)
    lines = set()
    for call in (lambda x: names["scaled"](x), lambda x: names["scaled"](x + 0)):
        lines |= {site.line for site, _ in watched(call, torch.ones(2, 3)) if site.what == "aten.mul.Tensor"}
    assert lines == {f"{file}:4"}


def test_what_a_product_reads_is_shown_where_its_rows_are_not_those_of_what_was_shown():
    """Einsum folds the heads that share a key into the tokens of a prompt, and takes another operator for one token."""
    weight = torch.ones(6, 4)

    def read(x):
        seen = watched(lambda heads: (heads * 2).flatten(1) @ weight, x)
        return [(site.what, tensor.shape) for site, tensor in seen if site.place == -1]

    assert read(torch.ones(5, 2, 3)) == [("aten.mm.default", (5, 6))]
    assert read(torch.ones(5, 6)) == []


def test_only_the_places_that_are_asked_for_are_shown():
    model = Step()
    wanted = {site for site, _ in watched(model, torch.ones(2, 3)) if site.what == "aten.mul_.Tensor"}
    assert [site for site, _ in watched(model, torch.ones(4, 3), wanted)] == list(wanted)


def test_nothing_stays_behind():
    model = Step()
    hooks = dict(nn.modules.module._global_forward_hooks)
    watched(model, torch.ones(2, 3))
    assert dict(nn.modules.module._global_forward_hooks) == hooks


@torch.library.custom_op("harness_tests::double", mutates_args={"x"})
def double(x: torch.Tensor) -> None:
    """Write into an argument and return nothing, as kernels of engines do."""
    x.mul_(2)


def test_an_operator_that_returns_nothing_shows_what_it_has_written_into():
    class Writes(nn.Module):
        def forward(self, x):
            double(x)
            return x

    seen = [(site.what, tensor.tolist()) for site, tensor in watched(Writes(), torch.ones(2))]
    assert ("harness_tests.double.default", [2.0, 2.0]) in seen


def test_memory_that_was_freed_is_not_shown_before_something_is_written_into_it():
    class Fills(nn.Module):
        def forward(self, x):
            torch.empty_like(x).mul_(2)  # whatever was there
            return torch.empty(2).copy_(x)

    names = [site.what for site, _ in watched(Fills(), torch.ones(2))]
    assert "aten.copy_.default" in names
    assert not any("empty" in name for name in names)


class TwoLayers(nn.Module):
    """Squares between its layers belong to no module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def alone(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) * x
        return x

    def in_turns(self, *ids):
        states = [self.embed(item) for item in ids]
        for layer in self.layers:
            products = [layer(x) for x in states]
            states = [product * x for product, x in zip(products, states, strict=True)]


def in_threads(model, *ids):
    barrier = threading.Barrier(len(ids))

    def run(item):
        barrier.wait()
        with torch.no_grad():
            return model.layers[1](model.layers[0](model.embed(item)))

    threads = [threading.Thread(target=run, args=(item,)) for item in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_forward(model, run):
    """Return for each forward its token ids, and what was shown of it."""
    names = {module: path for path, module in model.named_modules()}
    forwards = []

    def begin(_lookup, ids, _makes_numbers):
        shown = {}
        forwards.append((ids, shown))
        return lambda site, tensor: shown.update({replace(site, line=""): tensor.clone()})

    watcher = SiteWatcher(names, lambda *_: None, lookups=[Lookup("embed", ARGUMENTS)], on_ids=begin)
    with torch.no_grad(), watcher:
        run()
    return forwards


IDS = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])


def test_forwards_that_take_turns_are_told_apart_by_what_their_tensors_are_computed_from():
    model = TwoLayers()
    together = by_forward(model, lambda: model.in_turns(*IDS))
    assert [ids.tolist() for ids, _ in together] == [[1, 2, 3], [4, 5, 6]]
    for ids, shown in together:
        ((_, alone),) = by_forward(model, lambda ids=ids: model.alone(ids))
        outputs = {site: tensor for site, tensor in shown.items() if site.what == MODULE}
        assert len(outputs) == 3
        assert all(torch.equal(alone[site], tensor) for site, tensor in outputs.items())
        products = [tensor for site, tensor in shown.items() if site.what == "aten.mul.Tensor"]
        expected = [tensor for site, tensor in alone.items() if site.what == "aten.mul.Tensor"]
        assert all(map(torch.equal, products, expected))
        assert len(products) == len(expected) == 2


def test_forwards_in_threads_are_each_shown_with_their_operators():
    model = TwoLayers()
    together = by_forward(model, lambda: in_threads(model, *IDS))
    assert sorted(ids.tolist() for ids, _ in together) == [[1, 2, 3], [4, 5, 6]]
    for ids, shown in together:
        ((_, alone),) = by_forward(model, lambda ids=ids: model.layers[1](model.layers[0](model.embed(ids))))
        assert shown.keys() == alone.keys()
        assert all(torch.equal(alone[site], tensor) for site, tensor in shown.items())
        assert any(site.what == "aten.addmm.default" for site in shown)


def test_a_module_that_raises_in_a_thread_leaves_no_mode_there():
    model, modes = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3)), []

    def run():
        try:
            model(torch.ones(2, 4))
        except RuntimeError:
            modes.append(_get_current_dispatch_mode())

    names = {module: path for path, module in model.named_modules()}
    with SiteWatcher(names, lambda *_: modes.append(_get_current_dispatch_mode())):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(modes) > 1
    assert modes[-1] is None
