"""The service: an order and the event that tells of it are committed together, or not at all."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import UUID

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import update

from shop.database import Session, engine
from shop.tables import Order, Outbox, Stock


class NewOrder(BaseModel):
    product: str
    quantity: Annotated[int, Field(ge=1, le=1_000_000)]
    country: Annotated[str, Field(pattern="^[A-Z]{2}$")]


class PlacedOrder(NewOrder):
    id: UUID


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    await engine.dispose()


app = FastAPI(title="Shop", lifespan=lifespan)


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder) -> PlacedOrder:
    # Commits at the end of the block; an exception that leaves it rolls everything back.
    async with Session.begin() as session:
        order = Order(**new.model_dump())
        session.add(order)
        await session.flush()  # gives the order its id
        placed = PlacedOrder(id=order.id, **new.model_dump())
        session.add(
            Outbox(
                aggregate_type="order",
                aggregate_id=str(order.id),
                event_type="placed",
                payload=placed.model_dump(mode="json"),
            )
        )
        await session.flush()
        # Last, because every order of this product waits for the row until the commit.
        taken = await session.execute(
            update(Stock)
            .where(Stock.product == new.product, Stock.units >= new.quantity)
            .values(units=Stock.units - new.quantity)
            .returning(Stock.units)
        )
        if taken.first() is None:
            raise HTTPException(409, f"{new.quantity} of {new.product!r} are not in stock")
    return placed
