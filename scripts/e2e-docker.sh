#!/usr/bin/env bash
# Proves the images and docker-compose.yml on a real Docker engine, and prints a table.
#
#   scripts/e2e-docker.sh [--previous IMAGE] [STEP…]    all steps if none is named
#
# IMAGE is what `upgrade` starts from; else it is built from the first commit that had a
# Dockerfile. A project, images and volumes of its own are used, and removed in the end.
# Exits 0 only if every step passed.

# shellcheck disable=SC2317 # the steps are called by what stands in a list
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

steps=(build cold-up second-up stop-idle stop-busy kill-stock-service kill-order-service kill-report
    kill-rabbitmq kill-postgres late-postgres late-rabbitmq constrained tls observability upgrade
    side-by-side)

previous=
if [ "${1-}" = --previous ]; then
    previous=${2:?"--previous needs an image"}
    shift 2
fi
for step; do
    [[ " ${steps[*]} " = *" $step "* ]] || { echo "e2e-docker: no step $step; there are: ${steps[*]}" >&2; exit 2; }
done
[ $# = 0 ] || steps=("$@")

# Ports that are free for sure.
export COMPOSE_PROJECT_NAME=stock-e2e TAG=e2e RABBITMQ_PORT=0 PROMETHEUS_PORT=0 ORDERS=10000
scratch=$(mktemp -d)
logs=$scratch/log

# ---------------------------------------------------------------- what the steps are made of

compose() { docker compose --progress quiet "$@"; }

fail() {
    echo "failed: $*" >&2
    return 1
}

# wait_until SECONDS WHAT COMMAND…
wait_until() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || { fail "$what"; return; }
        sleep 0.2
    done
}

sql() { compose exec -T postgres psql -U stock -v ON_ERROR_STOP=1 -tAqc "$1"; }
shop() { compose run --rm --no-deps --no-TTY order-service "$@"; }
container() { compose ps --all --quiet "$1" | head -n 1; }
state() { docker inspect --format "{{.State.$1}}" "$2"; }

fresh() { compose --profile '*' down --volumes --remove-orphans --timeout 10; }
# Servers and workers on empty volumes, without an order service.
fresh_workers() {
    fresh
    compose up --detach --wait stock-service
}

processed() { sql 'select count(*) from processed_event'; }
processed_more_than() { [ "$(processed)" -gt "$1" ]; }
ended_well() { [ "$(state Status "$1") $(state ExitCode "$1")" = 'exited 0' ]; }

# The verdict, with all services running that there are. It waits until nothing is left to do.
verdict() { compose run --rm --no-deps --no-TTY report report --wait 300 --management 15672 "$@"; }

# Begins the play and comes back in the middle of it.
begin_play() {
    local before
    before=$(processed)
    compose up --detach --no-deps --force-recreate order-service
    wait_until 300 'nothing is processed' processed_more_than $((before + ORDERS / 10))
}
end_play() { wait_until 300 'the order service has not played to its end' ended_well "$(container order-service)"; }

# stop CONTAINER SECONDS: it must end by itself, in order, within that time
stop() {
    local begun=$SECONDS
    docker stop --time 30 "$1" >/dev/null
    [ "$(state ExitCode "$1")" = 0 ] || { fail "exit status $(state ExitCode "$1") after docker stop"; return; }
    [ $((SECONDS - begun)) -le "$2" ] || fail "docker stop took $((SECONDS - begun)) s"
}

kill_in_the_middle() { # kill_in_the_middle SERVICE
    fresh_workers
    begin_play
    [ "$(state Running "$(container order-service)")" = true ] || fail 'the play is over already'
    local victim
    victim=$(container "$1")
    docker kill "$victim" >/dev/null
    docker start "$victim" >/dev/null
    end_play
    verdict --min-copies 10
}

# ---------------------------------------------------------------- the steps

build() { compose build; }

cold-up() {
    fresh
    compose up --build --detach
    docker wait "$(container report)" >"$scratch/status"
    docker logs "$(container report)"
    [ "$(cat "$scratch/status")" = 0 ]
}

second-up() {
    compose down --timeout 30
    compose up --detach
    docker wait "$(container report)" >"$scratch/status"
    docker logs "$(container report)"
    [ "$(cat "$scratch/status")" = 0 ]
}

stop-idle() {
    fresh_workers
    stop "$(container stock-service)" 2
}

stop-busy() {
    fresh_workers
    begin_play
    local worker
    for worker in $(compose ps --quiet stock-service); do stop "$worker" 27; done
    compose up --detach --no-deps stock-service
    end_play
    verdict --min-copies 10
}

kill-stock-service() { kill_in_the_middle stock-service; }
kill-order-service() { kill_in_the_middle order-service; }
kill-rabbitmq() { kill_in_the_middle rabbitmq; }
kill-postgres() { kill_in_the_middle postgres; }

kill-report() {
    fresh_workers
    begin_play
    compose up --detach --no-deps report
    docker kill "$(container report)" >/dev/null
    end_play
    verdict --min-copies 10
}

# Everybody but the late one starts at once, the order service first.
late() {
    fresh
    local service
    for service in order-service stock-service migrate postgres rabbitmq; do
        [ "$service" = "$1" ] || compose up --detach --no-deps "$service"
    done
    sleep 60
    compose up --detach --no-deps "$1"
    end_play
    verdict --min-copies 10
}
late-postgres() { late postgres; }
late-rabbitmq() { late rabbitmq; }

# One worker with next to nothing: no rights, no place to write, a user that nobody knows.
constrained() {
    fresh_workers
    compose stop stock-service
    shop place --orders 5000
    shop relay
    local limits worker
    limits=(--network "${COMPOSE_PROJECT_NAME}_default" --read-only --cap-drop ALL --security-opt no-new-privileges
        --user 12345:54321 --memory 64m --memory-swap 64m --cpus 0.25
        --env DATABASE_URL=postgres://stock:stock@postgres/stock --env AMQP_URL=amqp://stock:stock@rabbitmq/%2f)
    start_worker 120 "${limits[@]}" "stock-service:$TAG"
    wait_until 300 'it does not drain the queue' drained
    stop "$worker" 27
    [ "$(state OOMKilled "$worker")" = false ]
    docker run --rm "${limits[@]}" "stock-service:$TAG" purge --horizon 30d
    verdict
}
# start_worker SECONDS ARGUMENT…: of `docker run`; $worker is healthy within that time
start_worker() {
    worker=$(docker run --detach "${@:2}")
    echo "$worker" >>"$scratch/containers"
    wait_until "$1" 'it does not become healthy' test_health "$worker"
}
test_health() { [ "$(state Health.Status "$1")" = healthy ]; }
drained() { shop drained; }

# Both servers by TLS: their names are verified, and the broker wants to see a certificate.
tls() {
    build # no part of compose runs it here
    local certs=$scratch/certs key name worker image verified
    mkdir "$certs"
    key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
    openssl req -x509 "${key[@]}" -days 2 -subj /CN=authority -keyout "$certs/ca.key" -out "$certs/ca.pem"
    for name in postgres rabbitmq worker; do
        openssl req "${key[@]}" -subj "/CN=$name" -keyout "$certs/$name.key" -out "$certs/$name.csr"
        openssl x509 -req -days 2 -in "$certs/$name.csr" -CA "$certs/ca.pem" -CAkey "$certs/ca.key" -CAcreateserial \
            -extfile <(echo "subjectAltName=DNS:$name") -out "$certs/$name.pem"
    done
    chmod a+r "$certs"/*.key # whoever the servers and the worker run as
    # PostgreSQL reads no key that others can read.
    docker run --rm --user 0 --entrypoint sh --volume "$certs:/certs" postgres:18 \
        -c 'chmod 600 /certs/postgres.key && chown postgres /certs/postgres.key'
    cat >"$certs/rabbitmq.conf" <<'END'
listeners.ssl.default = 5671
ssl_options.cacertfile = /certs/ca.pem
ssl_options.certfile = /certs/rabbitmq.pem
ssl_options.keyfile = /certs/rabbitmq.key
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
END
    cat >"$scratch/tls.yml" <<END
services:
  postgres:
    command: [postgres, -c, ssl=on, -c, ssl_cert_file=/certs/postgres.pem, -c, ssl_key_file=/certs/postgres.key]
    volumes: ["$certs:/certs:ro"]
  rabbitmq:
    volumes: ["$certs:/certs:ro", "$certs/rabbitmq.conf:/etc/rabbitmq/conf.d/95-tls.conf:ro"]
END
    export COMPOSE_FILE=docker-compose.yml:$scratch/tls.yml
    fresh
    compose up --detach --wait postgres rabbitmq

    image=(--network "${COMPOSE_PROJECT_NAME}_default" --volume "$certs:/certs:ro"
        --env "AMQP_URL=amqps://stock:stock@rabbitmq:5671/%2f?cacertfile=/certs/ca.pem&certfile=/certs/worker.pem&keyfile=/certs/worker.key")
    verified='postgres://stock:stock@postgres/stock?sslmode=verify-full&sslrootcert=/certs/ca.pem'
    refuses 'issued by nobody who is trusted' "${verified%&*}"
    refuses 'certificate is not for' "${verified/@postgres/@$(docker inspect --format '{{slice .Name 1}}' "$(container postgres)")}"
    image+=(--env "DATABASE_URL=$verified" "stock-service:$TAG")
    docker run --rm "${image[@]}" migrate
    start_worker 60 "${image[@]}"
    [ "$(sql 'select bool_and(ssl) from pg_stat_ssl join pg_stat_activity using (pid) where client_addr is not null')" = t ]
    [ "$(compose exec -T rabbitmq rabbitmqctl --quiet list_connections ssl | sort -u | grep -v '^ssl$')" = true ]
    shop place --orders 1000
    shop relay
    wait_until 60 'it does not drain the queue' drained
    verdict
    stop "$worker" 27
}
# refuses CAUSE DATABASE_URL: says why, and connects with none
refuses() {
    local said
    ! said=$(docker run --rm "${image[@]}" --env "DATABASE_URL=$2" "stock-service:$TAG" doctor 2>&1) || fail "it connected: $2"
    [[ $said = *"$1"* ]] || fail "it does not say '$1': $said"
}

# The metrics of both workers arrive in Prometheus, and its rules can be evaluated. (Grafana shows what it holds.)
observability() {
    fresh
    compose --profile observability up --detach --wait stock-service prometheus
    prometheus=http://$(compose --profile observability port prometheus 9090)
    wait_until 60 'Prometheus does not scrape two workers' scrapes_both
    wait_until 60 'Prometheus has not evaluated the rules' evaluates_all
}
scrapes_both() {
    [[ $(curl -fsS --data-urlencode 'query=count(up{job="stock-service"} == 1)' "$prometheus/api/v1/query") = *',"2"]'* ]]
}
evaluates_all() {
    local rules
    rules=$(curl -fsS "$prometheus/api/v1/rules")
    [[ $rules = *'"health":"ok"'* && $rules != *'"health":"unknown"'* && $rules != *'"health":"err"'* ]]
}

# The tag e2e-old: the previous release of the service, with the present order service.
make_previous() {
    build
    if [ -z "$previous" ]; then
        previous=stock-service:e2e-previous
        local first
        first=$(git log --diff-filter=A --format=%H -- Dockerfile | tail -n 1)
        echo "the previous image is that of $(git log -1 --format='%h %s' "$first")"
        git archive "$first" | docker build --quiet --target service --tag "$previous" -
    fi
    docker tag "$previous" stock-service:e2e-old
    docker tag "order-service:$TAG" order-service:e2e-old
}

# retry DELAY TIMES: what fails comes back after that delay, so many times
retry() {
    cat >"$scratch/retries.yml" <<END
services:
  stock-service:
    environment: { STOCK__RETRY__DELAY: $1, STOCK__RETRY__MULTIPLIER: "1", STOCK__RETRY__MAX_RETRIES: "$2" }
END
    export COMPOSE_FILE=docker-compose.yml:$scratch/retries.yml
}

# The previous release stops with messages in all queues, the present one goes on with them.
upgrade() {
    make_previous
    retry 4s 100 # until it no longer fails

    TAG=e2e-old fresh_workers
    shop malformed
    sql "create function refuse() returns trigger language plpgsql as
         \$\$ begin raise exception 'refused for now'; end \$\$;
         create trigger refuse before insert on reservation for each row
         when (new.quantity = 7.5) execute function refuse()"
    TAG=e2e-old begin_play
    # shellcheck disable=SC2046 # words
    docker stop --time 30 $(compose ps --quiet stock-service) >/dev/null
    local waiting
    waiting=$(shop drained) || true
    echo "between the two: $waiting, and 10 failed ones"
    [[ $waiting =~ ^([0-9,]+)' messages wait, '([0-9,]+)' of them' ]]
    [ "${BASH_REMATCH[1]}" != "${BASH_REMATCH[2]}" ] || fail 'nothing is left in the main queue'
    [ "${BASH_REMATCH[2]}" != 0 ] || fail 'nothing is left in a retry queue'

    compose up --detach --no-deps migrate
    compose up --detach --no-deps --wait stock-service
    [ "$(docker inspect --format '{{.Image}}' "$(container stock-service)")" = "$(docker inspect --format '{{.Id}}' "stock-service:$TAG")" ]
    sql 'drop trigger refuse on reservation'
    end_play
    verdict --min-copies 10
}

# The previous release and the present one on one queue, where every order fails: six attempts each, whoever makes them.
side-by-side() {
    make_previous
    retry 1s 5
    fresh
    TAG=e2e-old compose up --detach --wait --scale stock-service=1 stock-service
    compose up --detach --wait --no-deps --no-recreate stock-service
    local old new failed messages attempts worker
    old=$(container_of stock-service:e2e-old) new=$(container_of "stock-service:$TAG")
    sql "create function refuse() returns trigger language plpgsql as \$\$ begin raise exception 'refused'; end \$\$;
         create trigger refuse before insert on reservation for each row execute function refuse()"
    shop place --orders 200
    shop relay
    wait_until 120 'retries go on' drained
    failed=$(sql "select count(*) from shop.outbox where name = 'order.order.placed.v1'
                  and event_id not in (select event_id from processed_event)")
    [ "$failed" -gt 100 ]
    messages=$(curl -fsS --user stock:stock --data '{"count":500,"ackmode":"ack_requeue_true","encoding":"auto"}' \
        "http://$(compose port rabbitmq 15672)/api/queues/%2f/stock.events.failed/get")
    attempts=$(grep -o '"failed-attempts":[0-9]*' <<<"$messages" | cut -d: -f2 | sort | uniq --count | xargs)
    [ "$attempts" = "$failed 6" ] || fail "not $failed times six attempts: $attempts"
    for worker in "$old" "$new"; do
        [[ $(docker logs "$worker" 2>&1) = *'to be retried'* ]] || fail "a release took no part: $worker"
        [ "$(docker inspect --format '{{.RestartCount}}' "$worker")" = 0 ]
    done
}
container_of() { docker ps --quiet --no-trunc --filter "ancestor=$1" --filter "label=com.docker.compose.service=stock-service" | head -n 1; }

# ---------------------------------------------------------------- running them

# shellcheck disable=SC2317,SC2329 # called by the trap
clean_up() {
    [ ! -e "$scratch/containers" ] || xargs docker rm --force --volumes <"$scratch/containers" >/dev/null
    fresh
    docker image rm --force {stock,order}-service:{e2e,e2e-old} stock-service:e2e-previous >/dev/null 2>&1 || true
    rm -rf "$scratch"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

table=() status=0
for step in "${steps[@]}"; do
    printf '%-20s' "$step"
    begun=$SECONDS
    # In a shell of its own, where the first command that fails ends the step.
    set +e
    (set -e; "$step") >"$logs" 2>&1
    result=$?
    set -e
    took=$((SECONDS - begun))
    if [ $result = 0 ]; then word=passed; else word=FAILED status=1; fi
    table+=("$(printf '| %-20s | %5s s | %s |' "$step" $took $word)")
    echo "$word, $took s"
    [ $result = 0 ] || { cat "$logs" && compose logs --tail 20 2>&1; } | sed 's/^/    /'
done
printf '\n| step                 |    time | result |\n| --- | ---: | --- |\n'
printf '%s\n' "${table[@]}"
exit $status
