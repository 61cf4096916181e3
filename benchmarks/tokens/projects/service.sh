# A service that writes a log as services do, and a web server with its own.
cat > service.py <<'P'
import logging, random, sys, uuid

random.seed(7)
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout,
                    format="%(asctime)s %(levelname)s [%(name)s] %(message)s")
web, db, jobs = (logging.getLogger(n) for n in ("web", "db.pool", "jobs"))
for turn in range(900):
    web.info("GET /api/orders/%d 200 %dms request=%s", random.randrange(9000),
             random.randrange(3, 90), uuid.UUID(int=random.getrandbits(128)))
    if turn % 9 == 0:
        db.debug("connection %d returned to pool, %d idle", random.randrange(20), random.randrange(20))
    if turn % 50 == 0:
        jobs.info("heartbeat")
    if turn in (311, 702):
        db.warning("pool exhausted: waited %dms for a connection", 4000 + turn)
    if turn == 500:
        try:
            {"id": 77}["customer"]
        except KeyError:
            web.exception("order 77 could not be rendered")
    if turn == 640:
        jobs.error("job 5512 gave up after 3 tries: SMTP 550 mailbox unavailable")
web.critical("disk /var/lib/orders is 98% full")
P
python3 service.py > app.log
mkdir -p site/api
python3 - <<'P'
import json
people = [{"id": n, "name": f"Person {n}", "email": f"person{n}@example.com",
           "address": {"street": f"{n} Long Road", "city": "Springfield", "zip": f"{10000 + n}"},
           "roles": ["reader"] if n % 5 else ["reader", "admin"], "active": n % 7 != 0,
           "balance": n * 13.5} for n in range(1, 121)]
json.dump({"page": 1, "pages": 9, "total": 1080, "people": people}, open("site/api/people.json", "w"))
open("site/index.html", "w").write("<!doctype html>\n<html><head><title>Orders</title></head>\n<body>\n"
    + "".join(f'<div class="card"><a href="/orders/{n}">Order {n}</a><span>open</span></div>\n' for n in range(200))
    + "</body></html>\n")
P
serve() {
    python3 -u -m http.server --bind 127.0.0.1 -d site 8000 > access.log 2>&1 &
    until curl -s -o /dev/null http://127.0.0.1:8000/api/; do :; done
}
