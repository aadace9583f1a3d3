"""Changes of one expression of a program: which ones there are, that they compile, and that the program stays."""

import ast

import pytest

from harness.judge.explain.edits.operators import LIKELY, edited, edits_of

PROGRAM = """
def forward(self, x, gate=None):
    x = self.norm(x)
    if gate is not None and self.is_gated:
        x = x * torch.sigmoid(gate)
    scores = torch.nn.functional.linear(x, self.weight, self.bias)
    scores = scores.softmax(-1) if self.scale > 0 else scores
    scores /= scores.sum(-1, keepdim=True)
    return -scores * self.scale, 1
"""


@pytest.fixture(scope="module")
def edits():
    return edits_of(ast.parse(PROGRAM))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x = self.norm(x)", "is left out"),
        ("self.norm(x)", "is `x`"),
        ("self.norm(x)", "is applied twice"),
        ("if gate is not None and self.is_gated", "takes the other branch"),
        ("gate is not None", "is `gate is None`"),
        ("x * torch.sigmoid(gate)", "is `x`"),
        ("x * torch.sigmoid(gate)", "is `torch.sigmoid(gate)`"),
        ("torch.sigmoid(gate)", "is `gate`"),
        ("torch.nn.functional.linear(x, self.weight, self.bias)", "has no `self.bias`"),
        ("scores.softmax(-1)", "is `torch.sigmoid((scores))`"),
        ("scores.softmax(-1) if self.scale > 0 else scores", "is always `scores`"),
        ("scores /= scores.sum(-1, keepdim=True)", "is left out"),
        ("True", "is False"),
        ("-scores", "is `scores`"),
        ("self.scale", "is `1`"),
        ("self.scale", "is `self.scale * self.scale`"),
        ("1", "is 0"),
        ("-scores * self.scale", "is rounded to bfloat16"),
        ("(-scores * self.scale, 1)", "is in the other order"),
    ],
)
def test_a_change_is_tried(edits, old, new):
    assert (old, new) in {(edit.old, edit.new) for edit in edits}


def test_statements_are_exchanged(edits):
    texts = [edit.new for edit in edits if "before" in edit.new]
    assert "computes `scores /= scores.sum(-1, keepdim=True)` before" in " ".join(texts)
    assert len(texts) == 4  # a return stays the last


def test_every_change_is_another_program_that_compiles(edits):
    program = ast.parse(PROGRAM)
    before = ast.dump(program)
    texts = [ast.unparse(edited(program, edit)) for edit in edits]
    for text in texts:
        compile(text, "changed", "exec")
    assert ast.dump(program) == before
    assert ast.unparse(program) not in texts
    assert len(set(texts)) > 0.8 * len(texts) > 80


def test_what_is_left_out_comes_first(edits):
    ranks = [edit.rank for edit in edits]
    assert ranks == sorted(ranks)
    assert ranks[0] == LIKELY
    assert edits[-1].new.startswith("is rounded to")


@pytest.mark.parametrize("text", ["x.view(2, -1)", "x.to(torch.float32)", "x.unsqueeze(0)"])
def test_what_computes_nothing_is_not_left_out(text):
    edits = edits_of(ast.parse(f"y = {text}"))
    assert not [edit for edit in edits if edit.old == text and edit.rank == LIKELY]
