"""What a cell's leader believes of others that answer for mass, over the simulated network."""

from node.averaging.strategies.push_sum import BooksCommitted, PushSum
from node.cells.board import Neighbours
from node.cells.mass import MassExchange
from node.core.ids import PeerId
from node.core.journey import Partner
from node.core.mass import Books
from node.telemetry.events import Journal
from protos import cells_pb2 as pb
from protos import cells_pb2_grpc as rpc
from tests.cells.leaders import RUN, WINDOW, Peer, World, cell_id


class Giver(rpc.CellsServicer):
    """Answers with whatever it was told to."""

    def __init__(self, peer: Peer, answer: pb.GrantNote) -> None:
        self._answer = answer
        rpc.add_CellsServicer_to_server(self, peer.transport.server)

    async def Take(self, request, context):
        return self._answer


def test_an_answer_from_the_future_is_a_fault_and_counts_nothing(world: World) -> None:
    mass, taker, giver = PushSum(1, Books.begin(0, 64)), Peer(world, "taker"), Peer(world, "giver")
    mass.handle(BooksCommitted(Books.begin(0, 64), {}), 0.0)
    Giver(giver, pb.GrantNote(ready=True, since=WINDOW + 1, units={0: 16}))
    asks = MassExchange(taker.signer, RUN, taker.transport, taker.clock, Journal(), lambda: mass)
    near = Neighbours({cell_id(1): Partner(cell_id(1), PeerId("giver"), {})}, {})
    shares = taker.do(asks.shares(cell_id(0), WINDOW, near, 5.0))
    world.run()
    assert shares.result() == {}
    assert mass.books == Books.begin(0, 64)
    assert taker.faults[0] == ("giver", "an answer about mass that counts from the future")
