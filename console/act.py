"""The acting verbs from the jump host: find which agent the target belongs to, and have that one act.

What is acted on is fixed by the ids that the agents told before anything was ordered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvtop.agents.act import Command
from kvtop.agents.act_cli import Asked, Talk, verb_commands
from kvtop.agents.model import Instance, Snapshot
from kvtop.console.cli import notice
from kvtop.console.fleet.conversation import Conversation, DialOptions
from kvtop.console.fleet.dial import dialler
from kvtop.console.fleet.errors import ConnectError, InputError
from kvtop.console.fleet.targets import Target, parse_targets
from kvtop.console.options import DEFAULT_HOSTS, dial_options, host_options


class Place(NamedTuple):
    """A host whose agent answers, and what that agent knows."""

    target: Target
    conversation: Conversation
    snapshot: Snapshot

    @property
    def agent(self) -> tuple[str, int, int]:
        """Which agent it is: two hosts that are named may be one."""
        node = self.snapshot.node
        return node.name, node.agent_pid, node.agent_started_ns

    def named(self, name: str) -> list[Instance]:
        """Return the instances of that name or engine id that have not ended."""
        found = [each for each in self.snapshot.instances if name in (each.name, each.engine_id)]
        return [each for each in found if each.state not in ("down", "stopped")] or found


def act(asked: Asked, hosts: tuple[str, ...], **connection: Any) -> int:
    """Run one command on the host where its targets are; return the exit code.

    Raises:
        TargetError: an argument names no host.
        ConnectError: no host answers, or the agent went before the outcome.
        InputError: the targets are nowhere, in several places, or not on one host.
    """
    return asyncio.run(_act(asked, parse_targets(hosts or DEFAULT_HOSTS), dial_options(**connection)))


mode, drain, undrain, cancel, evict = verb_commands(act, host_options)
"""The commands of `kvtop`."""


async def _act(asked: Asked, targets: Sequence[Target], options: DialOptions) -> int:
    answers = await asyncio.gather(*(_reach(target, options) for target in targets))
    reached = [each for each in answers if isinstance(each, Place)]
    places = list({each.agent: each for each in reversed(reached)}.values())[::-1]
    errors = [each for each in answers if isinstance(each, ConnectError)]
    try:
        if not places:
            raise errors[0]
        for error in errors:
            notice(str(error))
        place, command = _fix(asked.command, places, errors)
        fixed = Asked(command, asked.yes, asked.json)
        return await Talk(fixed, "kvtop", host=place.target.label).hold(place.conversation.act)
    finally:
        for each in reached:
            await each.conversation.aclose()


async def _reach(target: Target, options: DialOptions) -> Place | ConnectError:
    """Ask one host for what its agent knows."""
    try:
        conversation = await dialler(options)(target)
        try:
            return Place(target, conversation, await conversation.snapshot())
        except BaseException:
            await conversation.aclose()
            raise
    except ConnectError as error:
        return error


def _fix(command: Command, places: Sequence[Place], errors: Sequence[ConnectError]) -> tuple[Place, Command]:
    """Return the place of a command's targets, and the command with their ids instead of names."""
    if command.verb == "cancel":
        if len(places) + len(errors) > 1:
            raise InputError("each agent numbers its own transfers: name one host with --host")
        return places[0], command
    found = [_instance(name, places, errors) for name in command.targets]
    if len({id(place) for place, _ in found}) > 1:
        told = ", ".join(f"{instance.name} on {place.target.label}" for place, instance in found)
        raise InputError(f"one command acts on one host, and these are on several: {told}")
    place = found[0][0]
    instances = [instance for _, instance in found]
    return place, msgspec.structs.replace(
        command,
        targets=[each.engine_id for each in instances],
        arguments=_with_peer(command, place, places),
        serving_elsewhere=_serving_elsewhere(instances, place, places),
    )


def _instance(name: str, places: Sequence[Place], errors: Sequence[ConnectError]) -> tuple[Place, Instance]:
    found = [(place, instance) for place in places for instance in place.named(name)]
    if len(found) == 1:
        return found[0]
    if found:
        told = ", ".join(f"{instance.engine_id} on {place.target.label}" for place, instance in found)
        raise InputError(f"{name!r} is the name of {len(found)} instances: name one by its engine id: {told}")
    if errors:
        raise ConnectError(
            errors[0].target,
            "no-answer",
            f"no host that answers has an instance {name!r}, and this one does not answer",
            "is the target there?",
        )
    known = sorted({instance.name for place in places for instance in place.snapshot.instances})
    where = ", ".join(place.target.label for place in places)
    raise InputError(f"no instance is called {name!r} on {where}; there are: {', '.join(known) or 'none'}")


def _with_peer(command: Command, place: Place, places: Sequence[Place]) -> dict[str, str]:
    """Return a command's arguments; a peer that only another node's agent knows is named by its engine id."""
    peer = command.arguments.get("peer")
    if peer is None or place.named(peer):
        return command.arguments
    elsewhere = {instance.engine_id for other in places for instance in other.named(peer)}
    if len(elsewhere) > 1:
        told = ", ".join(sorted(elsewhere))
        raise InputError(f"{peer!r} is the name of several peers: name one by its engine id: {told}")
    if not elsewhere:
        return command.arguments  # perhaps its engine has met it; the agent knows
    others = {name: value for name, value in command.arguments.items() if name != "peer"}
    return {**others, "peer_engine_id": elsewhere.pop()}


def _serving_elsewhere(targets: Sequence[Instance], place: Place, places: Sequence[Place]) -> int:
    """Return how many serving instances other nodes have for each of the targets' roles, at least."""
    others = [
        instance
        for other in places
        if other is not place
        for instance in other.snapshot.instances
        if instance.state == "serving"
    ]
    return min(sum(other.role in (target.role, "both") for other in others) for target in targets)
