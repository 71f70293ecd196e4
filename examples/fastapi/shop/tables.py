"""All tables. `python -m shop.tables` makes those of the shop, walrelay makes the others."""

import asyncio
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import BigInteger, CheckConstraint, DateTime, Identity, Text, func
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shop.database import engine


class Base(DeclarativeBase):
    type_annotation_map = {str: Text, int: BigInteger, datetime: DateTime(timezone=True)}


class Outbox(Base):
    """The table of `walrelay init --apply`, which makes it. Insert a row; never update one."""

    __tablename__ = "outbox"

    seq: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    id: Mapped[UUID] = mapped_column(default=uuid4, unique=True)
    aggregate_type: Mapped[str]
    aggregate_id: Mapped[str]
    event_type: Mapped[str]
    # none_as_null: None is NULL, an empty body, and not the JSON text null.
    payload: Mapped[Any | None] = mapped_column(JSONB(none_as_null=True))
    headers: Mapped[dict[str, str] | None] = mapped_column(JSONB(none_as_null=True))
    schema_version: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Inbox(Base):
    """The table of `walrelay init --apply --inbox`: what a consumer has handled, by Outbox-Id."""

    __tablename__ = "inbox"

    consumer: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    processed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    product: Mapped[str]
    quantity: Mapped[int]
    country: Mapped[str]


class Stock(Base):
    __tablename__ = "stock"
    __table_args__ = (CheckConstraint("units >= 0"),)

    product: Mapped[str] = mapped_column(primary_key=True)
    units: Mapped[int]


class Shipment(Base):
    """What the consumer does. Only the inbox keeps an order from being shipped twice."""

    __tablename__ = "shipments"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    order_id: Mapped[UUID]
    carrier: Mapped[str]


async def main() -> None:
    shop = [Base.metadata.tables[name] for name in ("orders", "stock", "shipments")]
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all, tables=shop)
        pens = insert(Stock).values(product="pen", units=1000)
        await connection.execute(pens.on_conflict_do_nothing())
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
