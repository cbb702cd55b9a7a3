"""What the programs share."""

from collections.abc import Callable

from torch import Tensor

from tests.support import rand

Program = Callable[..., list[Tensor]]


def collector(programs: dict[str, Program]) -> Callable[[Program], Program]:
    """A decorator that adds a program to ``programs``."""

    def program(function: Program) -> Program:
        programs[function.__name__] = function
        return function

    return program


def leaf(*size: int, seed: int = 0) -> Tensor:
    return rand(*size, seed=seed).requires_grad_()
