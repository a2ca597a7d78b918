"""Sessions in an operation's transaction: options of `op.session()`, and the user's own sessions on SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from oncemore import Guard, Policy, current_operation, once
from oncemore.errors import ConfigurationError

INSERT = text("INSERT INTO refunds VALUES ('r')")
POLICY = Policy(effect="transaction")


def test_session_takes_the_options_of_sqlalchemy(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with Guard(engine, policy=POLICY) as guard:

        @once(guard, key="{number}")
        def look(number: int) -> list[bool]:
            op = current_operation()
            with op.session(expire_on_commit=False, autoflush=False) as session:
                found = [session.expire_on_commit, session.autoflush]
            with pytest.raises(ConfigurationError, match="drop bind"):
                op.session(bind=engine)
            return found

        assert look(1) == [False, False]


def test_own_session_on_sqlite_is_told_to_use_op_session(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE refunds (id text)"))
    with Guard(engine, policy=POLICY) as guard:

        @once(guard, key="{number}")
        def refund(number: int, own: bool) -> int:
            if not own:
                with current_operation().session() as session:
                    session.execute(INSERT)
                    session.commit()
                return 1
            with Session(engine) as session:
                assert session.execute(text("SELECT count(*) FROM refunds")).scalar() == 0  # reading is no matter
                session.execute(INSERT)
            return 1

        with pytest.raises(ConfigurationError, match=r"holds SQLite's only write lock: use op.session\(\)"):
            refund(1, True)
        assert refund(2, False) == 1
        with Session(engine) as session:  # outside of an operation, it is as ever
            session.execute(INSERT)
            session.commit()
            assert session.execute(text("SELECT count(*) FROM refunds")).scalar() == 2


async def test_own_async_session_on_sqlite_is_refused(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE refunds (id text)"))
    async with Guard(engine, policy=POLICY) as guard:

        @once(guard, key="{number}")
        async def refund(number: int) -> Any:
            async with AsyncSession(engine) as session:
                await session.execute(INSERT)

        with pytest.raises(ConfigurationError, match="write lock"):
            await refund(1)
    await engine.dispose()
