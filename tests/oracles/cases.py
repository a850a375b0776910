"""The algorithms under test: the name and parameters that the package and the oracle's policies share."""

from dataclasses import dataclass

from oracles import policies


@dataclass(frozen=True)
class Case:
    """One algorithm with its parameters; neither side is built before it is asked for."""

    name: str
    parameters: tuple = ()

    def oracle(self):
        return getattr(policies, self.name)(**dict(self.parameters))

    def package(self, module):
        """The same policy from the package under test, passed in by the test."""
        return getattr(module, self.name)(**dict(self.parameters))

    def __str__(self):
        return f"{self.name}({','.join(f'{key}={value}' for key, value in self.parameters)})"


def case(name, **parameters):
    return Case(name, tuple(parameters.items()))


FULL = case("FullEM")
TAU = (
    case("EMTau", tau=3, revisit=None),
    case("EMTau", tau=3, revisit="on-empty"),
    case("EMTau", tau=5, revisit=7),
)
STAR = (
    case("EMStar"),
    case("EMStar", tail=0.75),
    case("EMStar", every=3),
    case("EMStar", tail=0.5, every=2),
)
LAZY = (
    case("EMLazy", threshold=0.9, full_every=5),
    case("EMLazy", threshold=0.99, full_every=3),
    case("EMLazy", threshold=0.2, full_every=4),  # between full iterations no row is active
)
BUT_STAR = (FULL, *TAU, *LAZY)
ALL = (*BUT_STAR, *STAR)
ONE_EACH = (FULL, TAU[1], STAR[0], LAZY[0])
