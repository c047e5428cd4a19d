# `make` lists the targets. They need cargo, those in Docker only Docker; those that need servers
# start their own (see scripts/with-servers).

.PHONY: help demo demo-docker demo-local down test producers deploy-check chaos bench lint doc contract sqlx sqlx-check ci e2e-docker
# More than there are cores: tests mostly wait for the servers.
TEST_THREADS ?= 4
CHAOS_SECONDS ?= 60

TARGET = $(or $(CARGO_TARGET_DIR),target)

.NOTPARALLEL: # they would wait for the same build folder

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

demo: ## an order service with its accidents, two workers, a kill -9; ends in a report
	scripts/demo

demo-docker: ## the demo in Docker; it goes on until "make down"
	scripts/demo-docker

demo-local: ## the demo on throw-away local servers, or those of DATABASE_URL and AMQP_URL
	scripts/demo-local

down: ## end the demo in Docker, and leave no container, volume, network or image of it
	docker compose --profile '*' down --volumes --remove-orphans
	-docker image rm --force stock-service order-service

e2e-docker: ## the images and docker-compose.yml on a Docker engine: stops, kills, late servers, an upgrade
	scripts/e2e-docker.sh

test: ## run the tests, on a real PostgreSQL and RabbitMQ
	PGBOUNCER=1 RUST_TEST_THREADS=$(TEST_THREADS) scripts/with-servers cargo test --locked -- --include-ignored --skip producers:: --skip observability::live::

producers: ## the examples in Python, Node and PHP against the service, with their own client libraries
	scripts/with-servers scripts/producers

deploy-check: ## the manifests against their schemas, the alerts with promtool, the dashboard with Prometheus
	ONLY=postgres scripts/with-servers scripts/deploy-check

chaos: ## every kind of fault, at random, and an audit (CHAOS_SECONDS=60; SEED=N for the same once more)
	cargo build --locked --bin stock-service --example chaos
	env -u DATABASE_URL -u AMQP_URL -u ONLY DURABLE=1 scripts/with-servers \
		$(TARGET)/debug/examples/chaos $(TARGET)/debug/stock-service --seconds $(CHAOS_SECONDS) $(addprefix --seed ,$(SEED))

bench: ## throughput, latency and growth, on servers that sync to disk; docs/benchmarks (SECTIONS="drains latency")
	cargo build --locked --release --bin stock-service --example bench
	env -u DATABASE_URL -u AMQP_URL -u ONLY DURABLE=1 scripts/with-servers \
		$(TARGET)/release/examples/bench $(TARGET)/release/stock-service $(addprefix --only ,$(SECTIONS))

lint: ## formatting, clippy, shellcheck
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	@if command -v shellcheck >/dev/null; then \
		echo shellcheck scripts/* .ci/run; shellcheck scripts/* .ci/run; \
	else echo 'shellcheck is not installed: skipped'; fi

doc: ## build the documentation, with warnings as errors
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --document-private-items

contract: ## write docs/contract/INPUTS.md anew, after a change to the vectors
	UPDATE_EXPECT=1 cargo test --locked --test it -- the_table_of_inputs

sqlx: ## write .sqlx anew, after a change to a query or a migration
	ONLY=postgres scripts/with-servers scripts/sqlx-prepare target/sqlx-data
	rm -rf .sqlx
	mv target/sqlx-data .sqlx

sqlx-check: ## fail if .sqlx is out of date
	ONLY=postgres scripts/with-servers scripts/sqlx-prepare target/sqlx-data
	@diff -r .sqlx target/sqlx-data || { echo '.sqlx is out of date: run "make sqlx"' >&2; exit 1; }

ci: lint doc sqlx-check test producers deploy-check chaos demo ## everything that must pass before a change is merged
