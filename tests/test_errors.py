"""Every error says who has to act, under a name of its own."""

from __future__ import annotations

import inspect

import pytest

import hutch
from hutch import errors
from hutch.errors import BY_CODE, HutchError, from_code

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, HutchError)]


def drawn() -> dict[str, str]:
    """The tree in the docstring of the module: each name, and the one it hangs from."""
    found, above = {}, {-1: ""}
    for line in (errors.__doc__ or "").splitlines():
        name = line.strip(" │├└─").partition(" ")[0]
        if not name or not ("──" in line or name == "HutchError"):
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4
        found[name] = above.get(depth - 1, "")
        above[depth] = name
    return found


def test_the_tree_is_drawn_as_it_is():
    real = {cls.__name__: cls.__mro__[1].__name__ for cls in ALL}
    real["HutchError"] = ""
    assert drawn() == real


def test_every_error_has_a_code_of_its_own():
    assert len({cls.code for cls in ALL}) == len(ALL) == len(BY_CODE)
    for cls in ALL:
        assert "code" in vars(cls) and cls.code.replace("_", "").isalpha() and cls.code.islower()


def test_every_error_has_a_status_that_fits():
    for cls in ALL:
        assert 400 <= cls.status < 600
        if issubclass(cls, errors.CallerError):
            assert cls.status < 500, "the caller's own fault is never the server's"
        if issubclass(cls, errors.NoSession | errors.SessionEnded):
            assert cls.status in (404, 410), "to a server, that is a caller who names a wrong one"
        elif issubclass(cls, errors.BoxError | errors.BackendUnavailable):
            assert cls.status >= 500


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_error_comes_back_from_its_code_as_what_it_was(cls):
    again = from_code(cls.code, "what happened")
    assert type(again) is cls and str(again) == "what happened"
    assert getattr(hutch, cls.__name__) is cls and cls.__name__ in hutch.__all__


@pytest.mark.parametrize(
    "code", ["", "os.system", "HutchError", "builtins.eval", "not found", "💥"]
)
def test_a_code_that_nobody_knows_is_an_error_and_never_looked_up(code):
    assert type(from_code(code, "x")) is HutchError


def test_errors_of_results_carry_them():
    result = hutch.Result(3, "out", "err", "outerr")
    with pytest.raises(hutch.CommandFailed, match="exit code 3: err") as failed:
        result.check()
    assert failed.value.result is result
    late = hutch.Result(124, "", "", "", timed_out=True, duration_ms=1500)
    with pytest.raises(hutch.TimedOut, match=r"1\.5 s") as timed_out:
        late.check()
    assert timed_out.value.result is late
    good = hutch.Result(0, "", "", "")
    assert good.check() is good and good.ok


def test_everything_this_library_raises_can_be_caught_at_once():
    for cls in ALL:
        assert issubclass(cls, HutchError) and not issubclass(cls, OSError | ValueError)
