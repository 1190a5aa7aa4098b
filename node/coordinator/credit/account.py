"""The account of one epoch: which peer did the work of which stage, by the statements of its
neighbours. Pure.

Work counts if both neighbours on a micro-batch's route confirm it: the peer before took the
worker's gradient, and the peer behind gave it one. The worker's own statement is needed only
against others that claim the same work. At each stage, tokens with a receipt, tokens without one
(unsigned) and tokens that the stage did not see (left out) sum to the epoch's tokens. A lie about a
size that most signers of a micro-batch contradict costs the statement of its signer, and no others.
The slow part of a check, the signature, is the caller's.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from node.coordinator.credit.statement import Statement
from node.core.ids import ENDS, PeerId, short
from node.core.journey import Path, Plan, Version


class CreditGround(StrEnum):
    """The reason for which a receipt, or an epoch of them, is refused."""

    MALFORMED = "malformed"
    """The bytes are no statement of work, or no record."""
    FORGED = "forged"
    """The signature is not by the peer that it names."""
    DOUBLE = "double"
    """A signer made two different statements about one epoch, or two peers claim the same work."""
    STOLEN = "stolen"
    """The work belongs to others: its peers are not neighbours on the micro-batch's route."""
    ELSEWHERE = "elsewhere"
    """The statement is of another epoch, another history or another cell."""
    STRANGER = "stranger"
    """The signer did not work by the plan."""
    ROOM = "room"
    """The statement has no room in the record of its epoch, where shorter ones come first."""
    SIZE = "size"
    """The micro-batch has another number of tokens according to its origin."""
    SUM = "sum"
    """The tokens of the micro-batches do not sum to the tokens that were committed."""
    UNCERTIFIED = "uncertified"
    """No majority of the voters has signed the version that the epoch made."""


NOBODY = PeerId("")
"""Stands for the peer of a refusal if no signer can be blamed."""


@dataclass(frozen=True, slots=True)
class RefusedCredit:
    """A refused statement, record or claim: the ground, the peer it concerns (its signer, or the
    worker of work that two peers claim; :data:`NOBODY` if no signer is to blame), the epoch, and
    one sentence."""

    ground: CreditGround
    peer: PeerId
    epoch: int
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """Work without a receipt. ``workers``: the peers that did it if they are known, else the peers
    that the plan names; ``silent``: neighbours that did not confirm it."""

    stage: int
    workers: tuple[PeerId, ...]
    silent: tuple[PeerId, ...]


@dataclass
class EpochAccount:
    """The tokens of one epoch by stage. ``receipts``: tokens with a receipt, by stage and worker;
    ``unsigned``: tokens without; ``left_out``: tokens that did not visit the stage."""

    epoch: int
    tokens: int
    stages: tuple[int, ...]
    receipts: Counter[tuple[int, PeerId]] = field(default_factory=Counter)
    unsigned: Counter[Gap] = field(default_factory=Counter)
    left_out: Counter[int] = field(default_factory=Counter)
    refused: list[RefusedCredit] = field(default_factory=list)

    def sums(self) -> dict[int, int]:
        """Receipts, unsigned and left-out tokens together, by stage: the epoch's tokens each."""
        found = dict.fromkeys(self.stages, 0)
        for (stage, _), tokens in self.receipts.items():
            found[stage] += tokens
        for gap, tokens in self.unsigned.items():
            found[gap.stage] += tokens
        for stage, tokens in self.left_out.items():
            found[stage] += tokens
        return found

    def of(self, peer: PeerId) -> int:
        """Tokens of a peer's receipts."""
        return sum(tokens for (_, worker), tokens in self.receipts.items() if worker == peer)

    def silent(self) -> list[PeerId]:
        """Peers that did not confirm others' work, the most tokens first."""
        missing = Counter[PeerId]()
        for gap, tokens in self.unsigned.items():
            for peer in gap.silent:
                missing[peer] += tokens
        return [peer for peer, _ in missing.most_common()]

    def refuse(self, ground: CreditGround, peer: PeerId, text: str) -> None:
        """Record a refusal."""
        self.refused.append(RefusedCredit(ground, peer, self.epoch, text))


Row = tuple[int, PeerId, PeerId]
"""Tokens, taker and giver of a micro-batch in one signer's statement."""


def settle(
    plan: Plan,
    made: Version,
    dropped: Collection[int],
    tokens: int,
    statements: Mapping[PeerId, Statement],
) -> EpochAccount:
    """Account of one epoch. ``plan``: its plan; ``made``: the version that it made; ``dropped``:
    micro-batches that do not count; ``tokens``: number of tokens counted in it; ``statements``:
    checked statements by signer."""
    return _Settling(plan, made, dropped, tokens).account(statements)


class _Settling:
    """One epoch while its account is made."""

    def __init__(self, plan: Plan, made: Version, dropped: Collection[int], tokens: int) -> None:
        self._plan = plan
        self._made = made
        self._names = [m.peer for m in plan.members]
        self._stage = {m.peer: m.stage for m in plan.members if m.current}
        self._dropped = set(dropped)
        self._paths = {p.index: p for p in plan.paths if p.index not in self._dropped}
        stages = sorted({h.stage for p in plan.paths for h in p.hops})
        self._account = EpochAccount(plan.epoch, tokens, (ENDS, *stages) if plan.paths else ())
        self._rows: dict[int, dict[PeerId, Row]] = {index: {} for index in self._paths}
        self._cleared = set[int]()
        """Micro-batches with sizes in doubt: no signer is believed about them."""
        self._doubles: dict[PeerId, list[int]] = {}
        """Micro-batches that several peers of a stage claim, by claiming peer."""
        by_stages: dict[tuple[int, ...], dict[int, int]] = {}
        self._places: dict[int, dict[int, int]] = {}
        """Place of each stage on a micro-batch's path: 0 for the origin, 1 for the first hop, and
        so on."""
        for index, path in self._paths.items():
            on = (ENDS, *(h.stage for h in path.hops))
            if on not in by_stages:
                by_stages[on] = {stage: i for i, stage in enumerate(on)}
            self._places[index] = by_stages[on]

    def account(self, statements: Mapping[PeerId, Statement]) -> EpochAccount:
        for signer in sorted(statements):
            self._read(signer, statements[signer])
        self._settle_sizes()
        self._settle_sum()
        unknown = list[int]()
        known = 0
        for index, path in self._paths.items():
            rows = self._rows[index]
            if not rows:
                unknown.append(index)
                continue
            (tokens,) = _sizes(rows)
            known += tokens
            self._credit(path, tokens, rows)
        for worker, indices in sorted(self._doubles.items()):
            text = f"it and others claim micro-batch {indices[0]} at one stage"
            if len(indices) > 1:
                text += f", and {len(indices) - 1} others"
            self._account.refuse(CreditGround.DOUBLE, worker, text)
        self._close(known, unknown)
        return self._account

    # ----------------------------------------------------------- statements

    def _read(self, signer: PeerId, said: Statement) -> None:
        """Take over the rows of a statement that can be right."""
        account = self._account
        stage = self._stage.get(signer)
        if stage is None:
            account.refuse(CreditGround.STRANGER, signer, "it did not work by this plan")
        elif not said.is_of(self._plan, self._made):
            account.refuse(CreditGround.ELSEWHERE, signer, "its statement is of another version")
        elif said.tokens != account.tokens:
            text = f"it counts {said.tokens} tokens, the others {account.tokens}"
            account.refuse(CreditGround.SUM, signer, text)
        else:
            self._take(signer, stage, said)

    def _take(self, signer: PeerId, stage: int, said: Statement) -> None:
        names = self._names
        count = len(names)
        rows = zip(said.indices, said.sizes, said.takers, said.givers, strict=True)
        stolen = list[int]()
        for index, tokens, taker, giver in rows:
            path = self._paths.get(index)
            if path is None:
                if index not in self._dropped:
                    stolen.append(index)
                continue
            if taker >= count or giver >= count:
                stolen.append(index)
                continue
            row = (tokens, names[taker], names[giver])
            if self._fits(path, signer, stage, row):
                self._rows[index][signer] = row
            else:
                stolen.append(index)
        if stolen:
            text = (
                f"it names peers beside it that the route of micro-batch {stolen[0]} does not have"
            )
            if len(stolen) > 1:
                text += f", and of {len(stolen) - 1} others"
            self._account.refuse(CreditGround.STOLEN, signer, text)

    def _fits(self, path: Path, signer: PeerId, stage: int, row: Row) -> bool:
        """Return True if the signer can stand between this taker and this giver on the path."""
        _, taker, giver = row
        places = self._places[path.index]
        here = places.get(stage)
        before = places.get(self._stage.get(taker, -1))
        behind = places.get(self._stage.get(giver, -1))
        if here is None or before is None or behind is None:
            return False
        origin = path.origin
        if here == 0:
            return signer == origin and 0 < behind <= before
        if (before == 0 and taker != origin) or (behind == 0 and giver != origin):
            return False
        return before < here and (behind == 0 or here < behind)

    # ----------------------------------------------------------- sizes

    def _settle_sizes(self) -> None:
        """Settle on one size for each micro-batch. A signer lies if most signers of a micro-batch
        contradict it and the others' sizes sum to the epoch's tokens; its statement is taken out.
        Where the signers differ and no majority tells, the micro-batch counts as unsigned and
        nobody is named: two that lie together could choose sizes by which an honest signer alone
        contradicts the sum."""
        disputed = [i for i, rows in self._rows.items() if len(_sizes(rows)) > 1]
        if not disputed:
            return
        liars = self._outvoted(disputed)
        if self._fits_without(liars):
            for liar, wrong in sorted(liars.items()):
                text = f"it gives micro-batch {wrong[0]} {self._rows[wrong[0]][liar][0]} tokens"
                if len(wrong) > 1:
                    text += f", and {len(wrong) - 1} others another size than they have"
                self._account.refuse(CreditGround.SIZE, liar, text)
            self._take_out(liars)
        self._clear([i for i in disputed if len(_sizes(self._rows[i])) > 1])

    def _outvoted(self, disputed: Sequence[int]) -> dict[PeerId, list[int]]:
        """The signers that more than half of a micro-batch's signers contradict, each with the
        micro-batches. Takes time linear in the rows."""
        found: dict[PeerId, list[int]] = {}
        for index in disputed:
            rows = self._rows[index]
            votes = Counter(tokens for tokens, _, _ in rows.values())
            tokens, count = votes.most_common(1)[0]
            if 2 * count > len(rows):
                for signer, row in rows.items():
                    if row[0] != tokens:
                        found.setdefault(signer, []).append(index)
        return found

    def _fits_without(self, liars: Collection[PeerId]) -> bool:
        """Return True if all agree without these signers, and the sizes sum to the epoch's
        tokens."""
        known = 0
        unknown = 0
        for rows in self._rows.values():
            sizes = {row[0] for peer, row in rows.items() if peer not in liars}
            if len(sizes) > 1:
                return False
            known += sum(sizes)
            unknown += not sizes
        return self._adds_up(known, unknown)

    def _adds_up(self, known: int, unknown: int) -> bool:
        """Return True if the epoch can consist of micro-batches with ``known`` tokens in all, and
        of ``unknown`` further micro-batches."""
        rest = self._account.tokens - known
        return rest == 0 or (rest > 0 and unknown > 0)

    def _settle_sum(self) -> None:
        """Handle sizes that do not sum to the epoch's tokens although no two signers contradict
        each other: leave the micro-batches unsigned that only one signer states, or the whole
        epoch. Nobody is named: signers that agree on a wrong size look like honest ones."""
        if self._fits_without(()):
            return
        account = self._account
        known = sum(sum(_sizes(rows)) for rows in self._rows.values())
        text = f"its micro-batches have {known} tokens, and {account.tokens} were committed"
        account.refuse(CreditGround.SUM, NOBODY, text)
        self._clear([i for i, rows in self._rows.items() if len(rows) == 1])
        if not self._fits_without(()):
            self._clear(self._paths)

    def _take_out(self, signers: Collection[PeerId]) -> None:
        """Take the statements of these signers out."""
        for rows in self._rows.values():
            for signer in [s for s in rows if s in signers]:
                del rows[signer]

    def _clear(self, indices: Iterable[int]) -> None:
        """Discard all statements about these micro-batches."""
        for index in indices:
            self._rows[index].clear()
            self._cleared.add(index)

    # ----------------------------------------------------------- work

    def _credit(self, path: Path, tokens: int, rows: dict[PeerId, Row]) -> None:
        """Credit a micro-batch at every stage of its path."""
        account = self._account
        taken: dict[PeerId, list[PeerId]] = {}
        given: dict[PeerId, list[PeerId]] = {}
        for signer, (_, taker, giver) in rows.items():
            taken.setdefault(giver, []).append(signer)
            given.setdefault(taker, []).append(signer)
        workers: dict[int, list[PeerId]] = {}
        for worker in taken.keys() & given.keys():
            workers.setdefault(self._stage[worker], []).append(worker)
        planned = self._planned(path)
        for stage in account.stages:
            by_plan = planned.get(stage)
            found = workers.get(stage, [])
            if found and by_plan not in found:
                # The planned peer may claim the work in its statement; a replacement has to.
                found = sorted({*found, *(p for p in rows if self._stage[p] == stage)})
            if by_plan is None:
                account.left_out[stage] += tokens
            elif len(found) == 1:
                account.receipts[stage, found[0]] += tokens
            elif found:
                for worker in found:
                    self._doubles.setdefault(worker, []).append(path.index)
                account.unsigned[Gap(stage, tuple(sorted(found)), ())] += tokens
            elif self._jumped(path, stage, rows):
                account.left_out[stage] += tokens
            else:
                account.unsigned[self._gap(path, stage, rows, taken, given)] += tokens

    @staticmethod
    def _planned(path: Path) -> dict[int, PeerId]:
        return {ENDS: path.origin, **{h.stage: h.peer for h in path.hops}}

    def _jumped(self, path: Path, stage: int, rows: dict[PeerId, Row]) -> bool:
        """Return True if two neighbours confirm that the route led around this stage."""
        places = self._places[path.index]
        here = places[stage]
        last = len(places)
        for signer, (_, _, giver) in rows.items():
            other = rows.get(giver)
            if other is None or other[1] != signer:
                continue
            behind = places[self._stage[giver]] or last
            if places[self._stage[signer]] < here < behind:
                return True
        return False

    def _gap(
        self,
        path: Path,
        stage: int,
        rows: dict[PeerId, Row],
        taken: Mapping[PeerId, Collection[PeerId]],
        given: Mapping[PeerId, Collection[PeerId]],
    ) -> Gap:
        """The gap of a micro-batch at a stage without a receipt for it."""
        seen = {*taken, *given, *rows}
        here = sorted(p for p in seen if self._stage[p] == stage)
        if stage == ENDS:
            here = [path.origin]
        worker = self._planned(path)[stage]
        if here and worker not in here:
            worker = here[0]
        ring = [path.origin, *(h.peer for h in path.hops)]
        place = self._places[path.index][stage]
        before = ring[place - 1]
        behind = ring[(place + 1) % len(ring)]
        if worker in rows:
            _, before, behind = rows[worker]
        silent = set[PeerId]()
        if worker not in taken:
            silent.add(before)
        if worker not in given:
            silent.add(behind)
        return Gap(stage, (worker,), tuple(sorted(silent)))

    # ----------------------------------------------------------- the sum

    def _close(self, known: int, unknown: Sequence[int]) -> None:
        """Account for the micro-batches without a size: together they have the remaining tokens of
        the epoch."""
        account = self._account
        rest = account.tokens - known
        if not rest:
            return
        workers = defaultdict[int, set[PeerId]](set)
        for index in unknown:
            for stage, peer in self._planned(self._paths[index]).items():
                workers[stage].add(peer)
        silent = self._origins(i for i in unknown if i not in self._cleared)
        for stage in account.stages:
            account.unsigned[Gap(stage, tuple(sorted(workers[stage])), silent)] += rest

    def _origins(self, indices: Iterable[int]) -> tuple[PeerId, ...]:
        return tuple(sorted({self._paths[i].origin for i in indices}))


def _sizes(rows: Mapping[PeerId, Row]) -> set[int]:
    """The sizes of a micro-batch that its signers state."""
    return {tokens for tokens, _, _ in rows.values()}


def names(peers: Collection[PeerId], most: int = 4) -> str:
    """Some peers for people, by their last letters."""
    said = ", ".join(short(p) for p in list(peers)[:most])
    if len(peers) > most:
        said += f" and {len(peers) - most} others"
    return said or "nobody"
