"""What placing a request asks: its candidates in order, and a node's schedule rolled forward."""
