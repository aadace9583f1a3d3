"""What is listed for `make mutants` stands in the sources of today."""

import ast

from tests.mutation.listed import LISTED
from tests.mutation.mutants import ROOT
from tests.mutation.subjects import files_of_tests, subjects


def test_every_listed_change_can_be_made():
    for mutant in LISTED:
        assert mutant.whole != (ROOT / mutant.path).read_text(), mutant
        ast.parse(mutant.whole)


def test_every_file_has_tests():
    for path in [*subjects(), *(mutant.path for mutant in LISTED)]:
        assert all((ROOT / test).is_file() for test in files_of_tests(path, all_tests=False)), path
