"""The consumer: ships each placed order once, however often its event is delivered.

It may be killed at any moment. Before the commit nothing has happened; after the commit and
before the ack the event is delivered again, and the inbox knows it.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Any
from uuid import UUID

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig
from nats.js.errors import NotFoundError
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from shop.database import Session, engine
from shop.tables import Inbox, Shipment

NATS_URL = os.environ.get("NATS_URL", "nats://localhost:4222")
STREAM = "OUTBOX"
SUBJECT = "outbox.order.placed"
CONSUMER = "shipping"

ACK_WAIT = 10.0  # seconds; an event that is not acked by then is delivered again
DELAY = 1.0  # seconds before the second delivery; one more before each further one
DELIVERIES = 5  # after so many an event is given up

CARRIERS = {"AT": "Alpenpost", "CH": "Gelber Wagen", "DE": "Deichkurier"}

log = logging.getLogger("shipping")


async def first_time(session: AsyncSession, event_id: str) -> bool:
    """Remember an event in the caller's transaction, and say whether it is new."""
    row = insert(Inbox).values(consumer=CONSUMER, id=event_id)
    result = await session.execute(row.on_conflict_do_nothing().returning(Inbox.id))
    return result.first() is not None


async def ship(session: AsyncSession, order: dict[str, Any]) -> None:
    carrier = CARRIERS.get(order["country"])
    if carrier is None:
        raise ValueError(f"no carrier goes to {order['country']}")
    session.add(Shipment(order_id=UUID(order["id"]), carrier=carrier))


async def handle(msg: Msg) -> None:
    event_id = (msg.headers or {})["Outbox-Id"]
    delivery, sequence = msg.metadata.num_delivered, msg.metadata.sequence.stream
    try:
        async with Session.begin() as session:
            if await first_time(session, event_id):
                await ship(session, json.loads(msg.data))
            else:
                log.info("event %s: shipped before", event_id)
    except OperationalError as err:
        # The database is away or busy, which is no fault of the event: it is not given up.
        log.warning("event %s, delivery %d: %s", event_id, delivery, err.orig)
        await msg.nak(delay=DELAY)
    except Exception as err:
        if delivery < DELIVERIES:
            log.warning("event %s, delivery %d: %s", event_id, delivery, err)
            await msg.nak(delay=DELAY * delivery)
        else:
            # The stream still has it, under this sequence.
            log.error("event %s given up, sequence %d: %s", event_id, sequence, err)
            await msg.term()
    else:
        await msg.ack()


async def consume(client: Client) -> None:
    try:
        events = await client.jetstream().pull_subscribe(
            SUBJECT, durable=CONSUMER, stream=STREAM, config=ConsumerConfig(ack_wait=ACK_WAIT)
        )
    except NotFoundError:
        sys.exit(f"error: no stream {STREAM}\nhint: start `walrelay run --create-stream` first")
    log.info("waiting for %s", SUBJECT)
    while True:
        try:
            # One at a time: the ack wait of an event does not run while it waits for another one.
            [msg] = await events.fetch(1)
        except TimeoutError:
            continue  # no event, or no server; the client reconnects by itself
        await handle(msg)


async def report(err: Exception) -> None:
    log.warning("NATS: %s", err)


async def main() -> None:
    task = asyncio.current_task()
    assert task is not None
    for sig in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sig, task.cancel)
    try:
        # -1: a broker that is away is waited for, however long it takes.
        async with await nats.connect(
            NATS_URL, error_cb=report, max_reconnect_attempts=-1
        ) as client:
            await consume(client)
    except asyncio.CancelledError:
        log.info("stopped")
    finally:
        await engine.dispose()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(main())
