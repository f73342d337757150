"""The planner under any order of arrivals, aborts, plans and commits, against the oracle."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl_backend.request import RequestId
from tests.fakes.harness import Harness, Setup, next_turn
from tests.properties.effort import examples
from tests.properties.workloads import samples, setups


class PlannerMachine(RuleBasedStateMachine):
    """At the end everything is drained, and each request must have got exactly its tokens."""

    @initialize(setup=setups())
    def start(self, setup: Setup) -> None:
        self.harness = Harness(setup)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        number = len(self.harness.records)
        for request in data.draw(samples(self.harness.setup, number)):
            self.harness.add(request)

    @precondition(lambda self: self.harness.records)
    @rule(data=st.data(), said=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def go_on(self, data: st.DataObject, said: list[int]) -> None:
        """The next turn of a conversation, which may come before the answer is complete."""
        records, longest = self.harness.records, self.harness.setup.max_sequence_length
        record = records[RequestId(data.draw(st.integers(0, len(records) - 1)))]
        turn = next_turn(record, len(records), said, longest)
        if turn is not None:
            self.harness.add(turn)

    @precondition(lambda self: self.harness.records)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.harness.records) - 1))
        self.harness.abort(RequestId(number))

    @precondition(lambda self: len(self.harness.records) >= 5)
    @rule()
    def abort_all(self) -> None:
        for request_id in self.harness.records:
            self.harness.abort(request_id)

    @precondition(lambda self: self.harness.num_in_flight < self.harness.setup.depth)
    @rule()
    def launch(self) -> None:
        self.harness.launch()

    @precondition(lambda self: self.harness.num_in_flight)
    @rule()
    def commit(self) -> None:
        self.harness.commit()

    @rule(count=st.integers(1, 20))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()
            self.harness.check()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.verify()
            self.harness.check()


PlannerMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=30)
TestPlannerMachine = PlannerMachine.TestCase
