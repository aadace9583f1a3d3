"""Changes of one expression of a program: which ones there are, that they compile, and that the program stays."""

import ast

import pytest

from harness.judge.explain.edits.change import LIKELY, UNLIKELY
from harness.judge.explain.edits.operators import NORMS, applied, edits_of
from harness.judge.explain.edits.words import term_of

PROGRAM = """
def forward(self, x, gate=None):
    x = self.norm(x)
    if gate is not None and self.is_gated:
        x = x * torch.sigmoid(gate)
    first, second = x.chunk(2, dim=-1)
    x = torch.cat((-second, first), dim=-1) + self.act_fn(gate) * x[..., :half]
    scores = torch.nn.functional.linear(x, self.weight, self.bias)
    scores = scores.softmax(-1) if self.scale > 0 else scores
    scores /= scores.sum(-1, keepdim=True)
    for layer in self.layers:
        scores = self.down_proj(layer(scores))
    return -scores * self.scale, 1
"""
ALTERNATIVES = {
    "self.down_proj": ("self.up_proj",),
    "self.scale": ("self.factor",),
    NORMS: ("self.norm",),
}


@pytest.fixture(scope="module")
def program():
    return ast.parse(PROGRAM)


@pytest.fixture(scope="module")
def edits(program):
    return edits_of(program, ALTERNATIVES)


def changed(program, edit):
    with applied(edit):
        return ast.unparse(program)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x = self.norm(x)", "is left out"),
        ("x = self.norm(x)", "is zero"),
        ("self.norm(x)", "is `x`"),
        ("self.norm(x)", "is applied twice"),
        ("if gate is not None and self.is_gated", "takes the other branch"),
        ("gate is not None", "is `gate is None`"),
        ("x * torch.sigmoid(gate)", "is `x`"),
        ("x * torch.sigmoid(gate)", "is `torch.sigmoid(gate)`"),
        ("torch.sigmoid(gate)", "is `gate`"),
        ("first, second = x.chunk(2, dim=-1)", "is `(second, first) = x.chunk(2, dim=-1)`"),
        ("x.chunk(2, dim=-1)", "is `((x)[..., ::2], (x)[..., 1::2])`"),
        ("(-second, first)", "is in the other order"),
        ("first", "is `second`"),
        ("self.act_fn(gate)", "is `torch.nn.functional.gelu((gate))`"),
        (":half", "is `half:`"),
        (":half", "is `::2`"),
        (":half", "is `:half + 1`"),
        ("torch.nn.functional.linear(x, self.weight, self.bias)", "has no `self.bias`"),
        ("scores.softmax(-1)", "is `torch.sigmoid((scores))`"),
        ("scores.softmax(-1) if self.scale > 0 else scores", "is always `scores`"),
        ("scores /= scores.sum(-1, keepdim=True)", "is left out"),
        ("scores /= scores.sum(-1, keepdim=True)", "comes after `for layer in self.layers`"),
        ("for layer in self.layers", "leaves out its last turn"),
        ("self.down_proj", "is `self.up_proj`"),
        ("self.down_proj(layer(scores))", "reads `self.norm(layer(scores))`"),
        ("torch.cat((-second, first), dim=-1)", "has no `dim=-1`"),
        ("gate is not None and self.is_gated", "is `gate is not None or self.is_gated`"),
        ("scores /= scores.sum(-1, keepdim=True)", "is `scores *= scores.sum(-1, keepdim=True)`"),
        ("keepdim=True", "is False"),
        ("-scores", "is `scores`"),
        ("self.scale", "is `1`"),
        ("self.scale", "is `self.factor`"),
        ("self.scale", "is multiplied by"),
        ("self.scale", "is `self.scale * self.scale`"),
        ("1", "is 0"),
        ("-scores * self.scale", "is rounded to bfloat16"),
        ("(-scores * self.scale, 1)", "is in the other order"),
    ],
)
def test_a_change_is_tried(edits, old, new):
    assert (old, new) in {(edit.old, edit.new) for edit in edits}


def test_every_change_is_another_program_that_compiles(program, edits):
    before = ast.unparse(program)
    texts = [changed(program, edit) for edit in edits]
    for text in texts:
        compile(text, "changed", "exec")
    assert ast.unparse(program) == before
    assert before not in texts
    assert len(set(texts)) > 0.8 * len(texts) > 200


def test_only_what_ran_is_changed(program):
    lines = PROGRAM.splitlines()
    ran = {at for at, line in enumerate(lines, start=1) if "x = x * torch.sigmoid" not in line and "return" not in line}
    olds = {edit.old for edit in edits_of(program, ALTERNATIVES, ran)}
    assert {"if gate is not None and self.is_gated", "layer(scores)"} <= olds
    assert not any("sigmoid" in old or "-scores" in old for old in olds)


def test_a_program_is_as_it_was_after_an_error(program, edits):
    before = ast.dump(program)

    def raise_within(edit):
        with applied(edit):
            assert ast.dump(program) != before
            raise KeyboardInterrupt

    for edit in edits[::7]:
        with pytest.raises(KeyboardInterrupt):
            raise_within(edit)
        assert ast.dump(program) == before


def test_a_statement_that_is_moved_is_said_with_its_line(program, edits):
    (edit,) = [item for item in edits if item.old.startswith("scores /=") and item.new.startswith("comes after `for")]
    assert PROGRAM.splitlines()[edit.line - 1].strip() == edit.old
    assert changed(program, edit).index("scores /=") > changed(program, edit).index("for layer")


def test_no_statement_is_moved_behind_a_return(program, edits):
    assert all(changed(program, edit).splitlines()[-1].strip().startswith("return") for edit in edits)


def test_what_is_left_out_comes_first(edits):
    ranks = [edit.rank for edit in edits]
    assert ranks == sorted(ranks)
    assert ranks[0] == LIKELY
    assert {edit.rank for edit in edits if edit.new.startswith(("is rounded to", "comes after"))} == {UNLIKELY}


@pytest.mark.parametrize("text", ["x.view(2, -1)", "x.to(torch.float32)", "x.unsqueeze(0)"])
def test_what_computes_nothing_is_not_left_out(text):
    edits = edits_of(ast.parse(f"y = {text}"))
    assert not [edit for edit in edits if edit.old == text and edit.rank == LIKELY]


ROTARY = """
def apply_rotary(q, position_embeddings):
    cos, sin = position_embeddings
    return q * cos + rotate_half(q) * sin
"""


@pytest.mark.parametrize(
    ("new", "term"),
    [
        ("is `q * cos`", "the rotary table's sine is left out: only the cosine is applied"),
        ("is `rotate_half(q) * sin`", "the rotary table's cosine is left out: only the sine is applied"),
        ("is `q * cos - rotate_half(q) * sin`", "rotary turns backwards (sign of the sine)"),
        ("is `(sin, cos) = position_embeddings`", "cosine and sine of the rotary table are exchanged"),
    ],
)
def test_what_an_edit_does_to_a_rotation(new, term):
    assert {term_of(edit) for edit in edits_of(ast.parse(ROTARY)) if edit.new == new} == {term}
