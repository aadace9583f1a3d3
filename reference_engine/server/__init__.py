"""The engine behind the HTTP interface of OpenAI: completions and chat, streamed or whole, for many clients at once.

One thread runs the engine and batches whatever is there (`async_engine`); the coroutines of one event loop read
requests (`schema`), hand them over and write answers (`completions`, `chat`). A client that leaves takes its requests
along.

Needs `fastapi` and `uvicorn`, the extra `serve`.
"""
