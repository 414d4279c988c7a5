"""Answers for ordinary users, who have no secret: identity by munge.

`polluxd answer` serves them, `polluxctl` asks. A request is one line: a munge credential around JSON. An answer is
munge credentials that only the asking user can decode, so that neither a listener on the network nor a program that
passes a request on learns anything.
"""
