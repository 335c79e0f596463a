"""Where the labels of a figure go: candidate boxes around each mark, and the choice that overlaps nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

# All lengths are in typographic points on the page, so that a choice holds for every resolution.
Place = tuple[float, float]
Segment = tuple[Place, Place]

_GAP = 1.6  # clear space between labels, and between a label and marks
_OVERLAP = 1000.0  # what no label may cost: a box on a box or on a mark
_MISTAKEN = 40.0  # as near to another mark as to its own, with no leader to say which is meant
_CLEARLY = 2.2  # how many times farther the others have to be
_APART = 2.0  # marks closer than this are one for the eye
_CROSSED = 60.0  # a leader through a label, or through another leader
_MARK_CROSSED = 8.0  # a leader through a mark
_COVERED = 3.0  # a point of a line that a label covers
_LEADER = 8.0  # having one
_DISTANCES = (1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0, 36.0, 45.0, 55.0, 67.0, 81.0, 97.0)
_NEAR = 6.0  # up to here a label needs no leader
_DIRECTIONS = 24
_LIFTS = (1.5, 4.0, 7.0, 11.0, 16.0)
_STEP = 3.0


@dataclass(frozen=True)
class Box:
    """A rectangle on the page, turned by `angle` radians about its centre."""

    x: float
    y: float
    width: float
    height: float
    angle: float = 0.0

    @cached_property
    def _axes(self) -> tuple[Place, Place]:
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        return (cos, sin), (-sin, cos)

    @property
    def _halves(self) -> Place:
        return self.width / 2, self.height / 2

    @cached_property
    def corners(self) -> tuple[Place, ...]:
        (cos, sin), _ = self._axes
        halves = [(sx * self.width / 2, sy * self.height / 2) for sx, sy in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
        return tuple((self.x + a * cos - b * sin, self.y + a * sin + b * cos) for a, b in halves)

    def grown(self, gap: float) -> Box:
        return Box(self.x, self.y, self.width + 2 * gap, self.height + 2 * gap, self.angle)

    def overlaps(self, other: Box) -> bool:
        """Whether the two share an inner point: no side of either parts them (the separating axis theorem)."""
        dx, dy = abs(self.x - other.x), abs(self.y - other.y)
        if self.angle == other.angle == 0:
            return 2 * dx < self.width + other.width and 2 * dy < self.height + other.height
        reach = self.width + self.height + other.width + other.height
        if 2 * dx > reach or 2 * dy > reach:
            return False
        return not any(self._parted(other, axis) for axis in (*self._axes, *other._axes))

    def _parted(self, other: Box, axis: Place) -> bool:
        mine = [x * axis[0] + y * axis[1] for x, y in self.corners]
        theirs = [x * axis[0] + y * axis[1] for x, y in other.corners]
        return max(mine) <= min(theirs) or max(theirs) <= min(mine)

    def covers(self, segment: Segment) -> float:
        """The length of a segment that lies inside (Liang and Barsky's clipping, in the frame of the box)."""
        (ax, ay), (bx, by) = segment
        low, high = 0.0, 1.0
        for (ux, uy), half in zip(self._axes, self._halves, strict=True):
            start = (ax - self.x) * ux + (ay - self.y) * uy
            way = (bx - ax) * ux + (by - ay) * uy
            if way == 0:
                if abs(start) > half:
                    return 0.0
                continue
            enter, leave = sorted(((-half - start) / way, (half - start) / way))
            low, high = max(low, enter), min(high, leave)
            if low >= high:
                return 0.0
        return (high - low) * math.dist(*segment)

    def distance(self, point: Place) -> float:
        """From its edge to a point outside, 0 for a point inside."""
        dx, dy = point[0] - self.x, point[1] - self.y
        over = (abs(dx * ux + dy * uy) - half for (ux, uy), half in zip(self._axes, self._halves, strict=True))
        return math.hypot(*(max(0.0, way) for way in over))

    def within(self, area: Box) -> bool:
        """Whether it lies wholly in an area whose sides are level."""
        left, right = area.x - area.width / 2, area.x + area.width / 2
        bottom, top = area.y - area.height / 2, area.y + area.height / 2
        return all(left <= x <= right and bottom <= y <= top for x, y in self.corners)


class Candidate(NamedTuple):
    """One place for a label: its cost before others are looked at, and the leader from the mark to the box."""

    box: Box
    cost: float
    leader: Segment | None = None


class Mark(NamedTuple):
    """What no label may lie on; labels of the same owner may stand beside it."""

    box: Box
    owner: str


class Label(NamedTuple):
    """The places to choose from, whose mark it names and where that is, and the cost from which on it is left out."""

    candidates: Sequence[Candidate]
    owner: str = ""
    at: Place | None = None
    limit: float = _OVERLAP


def around(at: Place, width: float, height: float, radius: float) -> list[Candidate]:
    """Places on rings around a mark of that radius, the near ones cheapest; far ones get a leader."""
    candidates = []
    for distance in _DISTANCES:
        for turn in range(_DIRECTIONS):
            angle = 2 * math.pi * turn / _DIRECTIONS
            cos, sin = math.cos(angle), math.sin(angle)
            # From the ring to the centre of a box that only just touches it there.
            x = at[0] + (radius + distance) * cos + width / 2 * max(-1.0, min(1.0, 1.5 * cos))
            y = at[1] + (radius + distance) * sin + height / 2 * max(-1.0, min(1.0, 1.5 * sin))
            far = distance > _NEAR
            leader = _leader(at, (x, y), width, height, radius) if far else None
            cost = 1.3 * distance + (_LEADER if far else 0.0)
            candidates.append(Candidate(Box(x, y, width, height), cost, leader))
    return candidates


def _leader(at: Place, centre: Place, width: float, height: float, radius: float) -> Segment:
    """From the edge of the mark to the edge of the box, on the line to its centre."""
    dx, dy = centre[0] - at[0], centre[1] - at[1]
    inside = min(
        width / 2 / abs(dx) if dx else math.inf, height / 2 / abs(dy) if dy else math.inf
    )  # share of the way that lies in the box
    outside = radius / math.hypot(dx, dy)
    return (at[0] + dx * outside, at[1] + dy * outside), (centre[0] - dx * inside, centre[1] - dy * inside)


def along(segment: Segment, width: float, height: float, wish: float, above: bool) -> list[Candidate]:
    """Places along a line, written in its direction; `wish` in [0, 1] is the favourite part of it."""
    (ax, ay), (bx, by) = segment
    length, angle = math.dist(*segment), math.atan2(by - ay, bx - ax)
    cos, sin = math.cos(angle), math.sin(angle)
    candidates = []
    for side in (1, -1):
        for lift in _LIFTS:
            for step in range(int(max(0.0, length - width) // _STEP) + 1):
                along_line, off = width / 2 + _STEP * step, side * (height / 2 + lift)
                box = Box(ax + along_line * cos - off * sin, ay + along_line * sin + off * cos, width, height, angle)
                cost = 0.3 * abs(along_line - wish * length) + 2 * lift + (0.0 if (side > 0) == above else 25.0)
                candidates.append(Candidate(box, cost))
    return candidates


def place(
    labels: Sequence[Label], marks: Sequence[Mark], lines: Sequence[Segment], area: Box
) -> list[Candidate | None]:
    """The choice of one candidate for each label: one after the other, then each again with all others in place.

    The first ones have the better places, so the cheapest result of several orders is taken.
    None where every candidate costs the label's limit, or would overlap a label, lie on a mark or leave the area.
    """
    choices = [_Choices(label, marks, lines, area) for label in labels]
    given = list(range(len(labels)))
    widest = sorted(given, key=lambda i: -max((c.box.width for c in labels[i].candidates), default=0.0))
    settled = [_settle(choices, order) for order in (given, given[::-1], widest)]
    return min(settled, key=lambda chosen: _cost_of_all(choices, chosen))


def _settle(choices: Sequence[_Choices], order: Sequence[int]) -> list[Candidate | None]:
    chosen: list[Candidate | None] = [None] * len(choices)
    for _ in range(4):
        before = list(chosen)
        for i in order:
            others = [other for j, other in enumerate(chosen) if j != i and other is not None]
            chosen[i] = choices[i].cheapest(others)
        if chosen == before:
            break
    return chosen


def _cost_of_all(choices: Sequence[_Choices], chosen: Sequence[Candidate | None]) -> float:
    placed = [candidate for candidate in chosen if candidate is not None]
    pairs = sum(_cost_of_pair(a, b) for a, b in combinations(placed, 2))
    return pairs + sum(choice.cost_of(candidate) for choice, candidate in zip(choices, chosen, strict=True))


class _Choices:
    """The candidates of one label by their own cost; what the page adds to it is computed once, when it's asked for."""

    def __init__(self, label: Label, marks: Sequence[Mark], lines: Sequence[Segment], area: Box) -> None:
        self.label, self.marks, self.lines, self.area = label, marks, lines, area
        self.candidates = sorted(label.candidates, key=lambda candidate: candidate.cost)
        self.known: dict[Candidate, float] = {}

    def cheapest(self, others: Sequence[Candidate]) -> Candidate | None:
        best, least = None, self.label.limit
        for candidate in self.candidates:
            if candidate.cost >= least:  # they come by cost, and the rest only adds to it
                break
            cost = self.cost_of(candidate)
            for other in others:
                if cost >= least:
                    break
                cost += _cost_of_pair(candidate, other)
            if cost < least:
                best, least = candidate, cost
        return best

    def cost_of(self, candidate: Candidate | None) -> float:
        """Of a candidate where nothing else is written, or of going without."""
        if candidate is None:
            return self.label.limit
        if candidate not in self.known:
            self.known[candidate] = candidate.cost + self.cost_of_page(candidate)
        return self.known[candidate]

    def cost_of_page(self, candidate: Candidate) -> float:
        """The cost of what a candidate covers or confuses; without end where it may not be."""
        box, leader = candidate.box.grown(_GAP), candidate.leader
        if not box.within(self.area) or any(box.overlaps(mark.box) for mark in self.marks):
            return math.inf
        cost = _COVERED * sum(box.covers(line) for line in self.lines)
        if leader is not None:
            return cost + _MARK_CROSSED * sum(mark.box.covers(leader) > 0 for mark in self.marks)
        return cost + (_MISTAKEN if self.mistaken(box) else 0.0)

    def mistaken(self, box: Box) -> bool:
        at, owner = self.label.at, self.label.owner
        if at is None:
            return False
        places = ((mark.box.x, mark.box.y) for mark in self.marks if mark.owner != owner)
        nearest = min((box.distance(place) for place in places if math.dist(at, place) > _APART), default=math.inf)
        return nearest < _CLEARLY * box.distance(at)


def _cost_of_pair(a: Candidate, b: Candidate) -> float:
    if a.box.grown(_GAP / 2).overlaps(b.box.grown(_GAP / 2)):
        return _OVERLAP
    crossed = a.leader is not None and b.box.covers(a.leader) > 0
    crossed = crossed or (b.leader is not None and a.box.covers(b.leader) > 0)
    if a.leader is not None and b.leader is not None:
        crossed = crossed or _cross(a.leader, b.leader)
    return _CROSSED if crossed else 0.0


def _cross(a: Segment, b: Segment) -> bool:
    """Whether two segments cross: each has its ends on different sides of the other."""
    return _side(a, b[0]) * _side(a, b[1]) < 0 and _side(b, a[0]) * _side(b, a[1]) < 0


def _side(segment: Segment, point: Place) -> float:
    (ax, ay), (bx, by) = segment
    return (bx - ax) * (point[1] - ay) - (by - ay) * (point[0] - ax)
