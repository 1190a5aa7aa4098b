"""The audit of receipts: records of any number of files, checked without a daemon. Pure.

Enters: records, a function that checks a signature. Leaves: the accounts of certified epochs, and
everything that was refused, with its ground. Never: a file.

A version's lineage is a hash of the plan behind it, which has the lineage before. So one quorum
certificate proves all earlier epochs in a row, and with each next plan the tokens that the epoch
before counted. In the same way a statement names the signer's statement before by hash, so one
signature proves all earlier ones in a row.

Records are loaded once to find their epochs, and once more when their epoch is audited: a file may
inflate to more than fits into memory.

The plan names its voters. Anybody can make up a history with voters of their own, so files have an
order: of two histories of one epoch, the one in the earlier file counts. An epoch that starts from
a version in an earlier file can prove that version, but says nothing about its tokens.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from node.consensus.voters import is_majority
from node.consensus.votes import Certificate, CheckSignature, proof, signing_domain
from node.coordinator.credit.account import (
    NOBODY,
    CreditGround,
    EpochAccount,
    RefusedCredit,
    settle,
)
from node.coordinator.credit.record import EpochRecord
from node.coordinator.credit.statement import Signed, Statement, work_domain
from node.core.errors import WireError
from node.core.ids import CellId, PeerId, short, short_cell
from node.core.journey import Plan, Version

Key = tuple[CellId, Version]
"""A cell, and the version that one of its epochs made."""


class RecordSource(Protocol):
    """A record, or a place from which it is loaded."""

    def load(self) -> EpochRecord:
        """The record."""
        ...


@dataclass
class RunAudit:
    """The audit of one run. ``accounts``: of certified epochs, in their order; ``rows``: number of
    unbroken sequences of epochs, each starting from the version that the previous one made;
    ``open``: tokens of epochs that no certificate proves, which do not count; ``signatures``:
    number of signatures that were checked."""

    run: str
    accounts: list[EpochAccount] = field(default_factory=list)
    refused: list[RefusedCredit] = field(default_factory=list)
    open: Counter[int] = field(default_factory=Counter)
    signatures: int = 0
    rows: int = 0

    @property
    def tokens(self) -> int:
        """Committed tokens of all certified epochs."""
        return sum(a.tokens for a in self.accounts)

    @property
    def work(self) -> int:
        """Committed tokens at all stages: the sum of receipts, unsigned and left-out tokens."""
        return sum(a.tokens * len(a.stages) for a in self.accounts)

    def receipts(self) -> Counter[PeerId]:
        """Tokens of receipts at all stages, by worker."""
        found = Counter[PeerId]()
        for account in self.accounts:
            for (_, worker), tokens in account.receipts.items():
                found[worker] += tokens
        return found

    def unsigned(self) -> Counter[tuple[PeerId, ...]]:
        """Tokens without a receipt at all stages, by their workers."""
        found = Counter[tuple[PeerId, ...]]()
        for account in self.accounts:
            for gap, tokens in account.unsigned.items():
                found[gap.workers] += tokens
        return found

    def silent(self) -> Counter[PeerId]:
        """Tokens that each peer did not confirm as a neighbour."""
        found = Counter[PeerId]()
        for account in self.accounts:
            for gap, tokens in account.unsigned.items():
                for peer in gap.silent:
                    found[peer] += tokens
        return found

    def left_out(self) -> int:
        """Tokens that did not visit a stage, at all stages."""
        return sum(sum(a.left_out.values()) for a in self.accounts)


def audit(files: Iterable[Iterable[RecordSource]], check: CheckSignature) -> dict[str, RunAudit]:
    """Audit the records of files, by run; the file that is trusted most comes first. The same epoch
    may be in files of several peers: statements are put together, each counts once."""
    runs: dict[str, _Auditing] = {}
    for number, sources in enumerate(files):
        for source in sources:
            record = source.load()
            if record.run not in runs:
                runs[record.run] = _Auditing(record.run, check)
            runs[record.run].add(number, source, record)
    return {run: auditing.audited() for run, auditing in sorted(runs.items())}


@dataclass
class _Found:
    """An epoch as records describe it. ``file``: number of the first file that has it; ``claimed``:
    numbers of tokens that the records state; ``sources``: sources of its records."""

    file: int
    number: int
    leader: PeerId
    claimed: set[int] = field(default_factory=set)
    sources: list[RecordSource] = field(default_factory=list)


@dataclass(frozen=True)
class _Proof:
    """A proof of a version: a counted epoch starts from it. ``file``: number of the file with that
    epoch; ``tokens``: number of tokens counted before it, by its plan."""

    file: int
    tokens: int


@dataclass
class _Epoch:
    """One epoch, put together from records."""

    plan: Plan
    made: Version
    dropped: tuple[int, ...]
    claimed: set[int]
    certificates: dict[Hashable, Certificate] = field(default_factory=dict)
    """Certificates by their proofs. Files may order the ballots of one version differently."""
    signed: dict[PeerId, dict[Signed, None]] = field(default_factory=dict)
    """Statements by the signers that they name, each once."""


class _Auditing:
    """The audit of one run under way."""

    def __init__(self, run: str, check: CheckSignature) -> None:
        self._check = check
        self._run = run
        self._audit = RunAudit(run)
        self._found: dict[Key, _Found] = {}
        self._proven: dict[Key, _Proof] = {}
        """Versions from which a counted epoch starts."""
        self._counted: dict[tuple[CellId, int], Version] = {}
        """The version that counts, of each epoch of a cell."""
        self._vouched: dict[PeerId, set[bytes]] = {}
        """Hashes of statements that a checked statement of the same signer names."""

    def add(self, file: int, source: RecordSource, record: EpochRecord) -> None:
        """Take a record of a file into the audit. It will be loaded again from ``source``."""
        plan = record.plan
        key = (plan.cell_id, record.made)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _Found(file, plan.epoch, plan.leader)
        found.claimed.add(record.tokens)
        found.sources.append(source)

    @staticmethod
    def _together(found: _Found) -> _Epoch:
        """The content of all records of an epoch."""
        first = found.sources[0].load()
        epoch = _Epoch(first.plan, first.made, first.dropped, found.claimed)
        for source in found.sources:
            record = first if source is found.sources[0] else source.load()
            if record.certificate is not None:
                epoch.certificates.setdefault(proof(record.certificate), record.certificate)
            for signed in record.signed:
                epoch.signed.setdefault(signed.peer, {})[signed] = None
        return epoch

    def audited(self) -> RunAudit:
        """Check everything, the newest epochs first."""
        a = self._audit
        by_epoch: dict[int, list[Key]] = {}
        for key, found in self._found.items():
            by_epoch.setdefault(found.number, []).append(key)
        for number in sorted(by_epoch, reverse=True):
            for key in sorted(by_epoch[number], key=self._rank):
                self._audit_epoch(key, self._together(self._found[key]))
        a.accounts.reverse()
        made = {(cell, version) for (cell, _), version in self._counted.items()}
        a.rows = sum(key not in made for key in self._proven)
        a.refused.sort(key=lambda r: (r.epoch, r.peer))
        return a

    def _rank(self, key: Key) -> tuple[int, bool, bool, Key]:
        """Sort key for the histories of one epoch: the earlier file first; within a file, the
        history on which more epochs were built, and last one on which only later files build."""
        trusted = self._trusted_proof(key)
        later = trusted is None and key in self._proven
        return self._found[key].file, trusted is None, later, key

    def _trusted_proof(self, key: Key) -> _Proof | None:
        """The proof of a version by its own file or an earlier one, which is trusted more; None
        without such a proof."""
        proof = self._proven.get(key)
        if proof is None or proof.file > self._found[key].file:
            return None
        return proof

    def _audit_epoch(self, key: Key, epoch: _Epoch) -> None:
        a = self._audit
        cell, made = key
        number = epoch.plan.epoch
        if key not in self._proven and not self._certified(epoch):
            tokens = max(epoch.claimed)
            a.open[number] += tokens
            text = f"no certificate of a majority proves its {tokens} tokens"
            self._refuse(CreditGround.UNCERTIFIED, epoch, text)
            return
        if self._counted.setdefault((cell, number), made) != made:
            a.open[number] += max(epoch.claimed)
            text = f"two histories of {short_cell(cell) or 'the run'} have it, and one counts"
            self._refuse(CreditGround.DOUBLE, epoch, text)
            return
        statements = self._statements(epoch)
        tokens = self._tokens(epoch, self._trusted_proof(key), statements)
        self._proven[cell, epoch.plan.base] = _Proof(self._found[key].file, epoch.plan.tokens)
        account = settle(epoch.plan, made, epoch.dropped, tokens, statements)
        a.refused += account.refused
        a.accounts.append(account)

    def _refuse(
        self, ground: CreditGround, epoch: _Epoch, text: str, peer: PeerId | None = None
    ) -> None:
        about = epoch.plan.leader if peer is None else peer
        self._audit.refused.append(RefusedCredit(ground, about, epoch.plan.epoch, text))

    # ----------------------------------------------------------- certificates

    def _certified(self, epoch: _Epoch) -> bool:
        return any(self._proves(c, epoch) for c in epoch.certificates.values())

    def _proves(self, c: Certificate, epoch: _Epoch) -> bool:
        """Return True if a majority of the plan's voters has signed this certificate."""
        voters = epoch.plan.electorate.voters
        if not voters or (c.cell, c.version, c.voters) != (epoch.plan.cell_id, epoch.made, voters):
            return False
        agreed = set[PeerId]()
        domain = signing_domain("vote", self._run)
        for ballot in c.agreeing():
            if ballot.peer in voters and not is_majority(voters, agreed):
                said = c.vote(ballot).said()
                if self._signed(ballot.peer, said, ballot.signature, domain):
                    agreed.add(ballot.peer)
        return is_majority(voters, agreed)

    def _tokens(
        self, epoch: _Epoch, proof: _Proof | None, statements: Mapping[PeerId, Statement]
    ) -> int:
        """Number of tokens that the epoch counted: up to the plan of ``proof``. Without a proof,
        the number that most members of the plan state counts; without statements, the number in
        most records. If several numbers are equally frequent, the least counts."""
        tokens = min(epoch.claimed)
        members = {m.peer for m in epoch.plan.members}
        said = Counter(s.tokens for p, s in statements.items() if p in members)
        if proof is not None:
            tokens = max(0, proof.tokens - epoch.plan.tokens)
        elif said:
            tokens = max(sorted(said), key=said.__getitem__)
        if epoch.claimed != {tokens}:
            wrong = max(epoch.claimed - {tokens})
            text = f"a record says {wrong} tokens, {tokens} count"
            self._refuse(CreditGround.SUM, epoch, text, NOBODY)
        return tokens

    # ----------------------------------------------------------- statements

    def _statements(self, epoch: _Epoch) -> Mapping[PeerId, Statement]:
        """The statements about an epoch that their signers have signed, one for each."""
        found: dict[PeerId, Statement] = {}
        for peer, said in epoch.signed.items():
            honest = [s for s in said if self._is_of_signer(s)]
            for _ in range(len(said) - len(honest)):
                # Whoever wrote a record that holds it may have made it.
                text = f"a statement in the name of {short(peer)} is not signed by it"
                self._refuse(CreditGround.FORGED, epoch, text, NOBODY)
            parsed = dict[Statement, None]()
            for signed in honest:
                try:
                    statement = Statement.parse(signed.said)
                except WireError as e:
                    self._refuse(CreditGround.MALFORMED, epoch, str(e), peer)
                    continue
                if statement.is_of(epoch.plan, epoch.made):
                    parsed[statement] = None
                else:
                    # Whoever wrote the record may have put it there.
                    text = f"a statement of {short(peer)} is of another version"
                    self._refuse(CreditGround.ELSEWHERE, epoch, text, NOBODY)
            if len(parsed) > 1:
                self._refuse(CreditGround.DOUBLE, epoch, "it has signed two statements", peer)
            for statement in [*parsed][:2]:
                if statement.before:
                    self._vouched.setdefault(peer, set()).add(statement.before)
            if len(parsed) == 1:
                found[peer] = [*parsed][0]
        return found

    def _is_of_signer(self, signed: Signed) -> bool:
        if signed.hash in self._vouched.get(signed.peer, ()):
            return True
        return self._signed(signed.peer, signed.said, signed.signature, work_domain(self._run))

    def _signed(self, peer: PeerId, said: bytes, signature: bytes, domain: str) -> bool:
        self._audit.signatures += 1
        return self._check(peer, said, signature, domain)
