"""The connection to Postgres, for the service and for the consumer."""

import os

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

URL = os.environ.get("DATABASE_URL", "postgresql+psycopg://postgres@localhost:5432/shop")

# pool_pre_ping: a connection that Postgres closed meanwhile is replaced, not handed out.
engine = create_async_engine(URL, pool_pre_ping=True)

# expire_on_commit=False: objects can be read after the commit without another query.
Session = async_sessionmaker(engine, expire_on_commit=False)
