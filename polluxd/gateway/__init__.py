"""The only way in for users' processes: agents and users' `polluxctl`.

`polluxd gateway` knows who asks, checks every value once, and writes. It is stateless: several may run, and each may be
started again at any moment.

Starlette on uvicorn, because nearly all connections wait: two thousand long polls are two thousand objects of one
asyncio loop, at some kilobytes each. uvicorn leaves HTTP to llhttp (the parser of Node.js, by httptools), the loop to
libuv (by uvloop) and TLS to OpenSSL; Starlette adds paths and no more. Frameworks above them (FastAPI, Litestar) bring
what is not needed here, and a server with a thread for each connection 2,000 stacks.
"""
