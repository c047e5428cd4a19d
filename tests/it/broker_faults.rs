//! The broker restarts, is killed, frozen, short of memory, or ends connections; the service goes on by itself.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::support::{Endpoint, Order, Process, Scripted, Servers, Step, TestBed, eventually};

/// Has each order of 666 fail for now.
async fn fail_666(bed: &TestBed) {
    bed.on_reservation("if new.quantity = 666 then raise 'scripted'; end if;").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_in_every_stage_outlive_the_brokers_restart_and_its_death() {
    let servers = Servers::start_rabbitmq().await;
    let mut bed = servers.bed().await;
    bed.set("consume.workers", "1");
    bed.set_ladder(1, 2_000); // it ends while the broker is away
    bed.declare().await;
    let script = Scripted::new(|message, before| match message.event.lines() {
        2 if before == 0 => Step::Fail,
        _ => Step::Apply,
    });
    let service = bed.start_with(script).await;
    // The restart comes first: a queue that was declared less than a second before the broker is killed is lost, which
    // is the broker's own fault.
    for (round, is_in_order) in [(1, true), (2, false)] {
        bed.broker.publish_all(Order::EVENT, (0..5).map(|n| format!("no event {round} {n}"))).await;
        bed.broker.has(&bed.broker.failure_queue(), 5).await;
        bed.broker.publish_all(Order::EVENT, (0..5).map(|_| Order::new(2).body())).await;
        bed.broker.has(&bed.broker.retry_queue(2_000), 5).await;
        let lock = bed.side_session("lock table reservation in access exclusive mode").await;
        bed.broker.publish_all(Order::EVENT, Order::many(10).iter().map(Order::body)).await;
        bed.blocked(1).await;
        match is_in_order {
            true => servers.rabbitmq().stop().await,
            false => servers.rabbitmq().kill().await,
        }
        drop(lock);
        servers.rabbitmq().start().await;
        bed.has_processed(round * 15).await;
        assert_eq!(bed.broker.failed(5).await.len(), 5);
    }
    service.stop().await;
    assert_eq!(bed.reservations().await, 2 * (10 + 5 * 2));
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

/// Has the broker close the service's connections fifteen times, as an operator does, with time to connect in between.
/// Gives how many connections it closed.
const CLOSE_AGAIN_AND_AGAIN: &str = r#"
    IsOurs = fun(Connection) ->
        [{_, Properties}] = rabbit_reader:info(Connection, [client_properties]),
        case lists:keyfind(<<"connection_name">>, 1, Properties) of
            {_, _, <<"stock-service", _/binary>>} -> true;
            _ -> false
        end
    end,
    Close = fun(_) ->
        Closed = [catch rabbit_networking:close_connection(Connection, "test") ||
            Connection <- rabbit_networking:connections(), (catch IsOurs(Connection)) =:= true],
        timer:sleep(1500),
        length(Closed)
    end,
    lists:sum(lists:map(Close, lists:seq(1, 15)))."#;

/// The channels of each connection of the service that was made for this.
async fn channels(servers: &Servers, purpose: &str) -> Vec<u32> {
    let list = servers.rabbitmqctl(&["--quiet", "list_connections", "client_properties", "channels"]).await;
    let made_for_it = list.lines().filter(|line| line.contains(&format!("stock-service {purpose}")));
    made_for_it
        .map(|line| line.split_whitespace().last().and_then(|channels| channels.parse().ok()).expect(line))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_closed_again_and_again_lose_nothing_and_leak_nothing() {
    const ROUNDS: usize = 20;
    /// KiB of buffers that lapin has for the two connections. Of the first ones only what they use is resident; later ones come
    /// from memory that was freed, and are resident as a whole.
    const BUFFERS: u64 = 2 * 8 * 1024;

    let servers = Servers::start_rabbitmq().await;
    let mut bed = servers.bed().await;
    bed.set("consume.workers", "2");
    bed.set("consume.prefetch", "50");
    bed.set_ladder(1, 50);
    // Freed buffers stay with the arena they came from; which one is chance.
    bed.set_variable("MALLOC_ARENA_MAX", "1");
    fail_666(&bed).await;
    let mut service = bed.spawn(&["consume"]);
    let (malformed, failing) = ("no event".to_owned(), Order::of("666"));
    bed.broker.publish_all(Order::EVENT, [malformed.clone(), failing.body()]).await;
    bed.broker.publish_all(Order::EVENT, Order::many(300).iter().map(Order::body)).await;
    bed.has_processed(300).await;
    bed.broker.failed(2).await;
    eventually("both workers", async || bed.broker.consumers().await == 2).await;
    let (descriptors, memory) = (service.descriptors(), service.memory());

    let load = async {
        let mut pace = tokio::time::interval(Duration::from_millis(1_000)); // as long as the closes go on
        for _ in 0..ROUNDS {
            pace.tick().await;
            let orders = Order::many(80);
            let good = orders.iter().chain(&orders[..10]).map(Order::body);
            let bad = [malformed.clone(), format!("no event {}", orders[0].event_id), Order::of("666").body()];
            bed.broker.publish_all(Order::EVENT, good.chain(bad)).await;
        }
    };
    let (closed, ()) = tokio::join!(servers.rabbitmqctl(&["eval", CLOSE_AGAIN_AND_AGAIN]), load);
    let closed: u32 = closed.trim().parse().expect("a number");
    assert!(closed >= 10, "only {closed} connections were closed"); // some come again late

    bed.has_processed(300 + 80 * 20).await;
    // A close between copy and acknowledgement may leave a second copy; none may be missing.
    let all_is_settled =
        async || bed.broker.in_work().await == 0 && bed.broker.depth(&bed.broker.failure_queue()).await >= 3 * 20;
    eventually("all others are parked", all_is_settled).await;
    bed.broker.take(&bed.broker.failure_queue()).await;
    // The windows are open again, and a copy is made on a fresh connection.
    bed.broker.publish_all(Order::EVENT, Order::many(300).iter().map(Order::body).chain([malformed])).await;
    bed.has_processed(600 + 80 * 20).await;
    bed.broker.failed(1).await;
    eventually("both workers", async || bed.broker.consumers().await == 2).await;
    assert_eq!(channels(&servers, "consume").await, [2], "one connection, one channel a worker");
    let publishing = channels(&servers, "publish").await;
    assert!(matches!(publishing[..], [1..=16]), "one connection, eight channels a worker at most: {publishing:?}");
    // Each of the closes, ten at least, would have left one. The pool may have three more in use, and the runtime that
    // async-compat makes once, when a connection ends, takes another four.
    eventually("no more descriptors than before", async || service.descriptors() <= descriptors + 8).await;
    assert!(service.memory() < (memory + BUFFERS) * 6 / 5, "{memory} KiB of memory before, {} after", service.memory());
    assert!(service.is_running());
    let log = servers.rabbitmq_log();
    assert!(!log.contains("unknown delivery tag"), "{log}");
    ends(service).await;
    assert_eq!(bed.reservations().await, 600 + 80 * 20);
    bed.finish().await;
}

async fn ends(service: Process) {
    service.signal("TERM").await;
    let end = service.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_blocks_publishing_or_is_frozen_holds_up_copies_and_loses_none() {
    let servers = Servers::start_rabbitmq().await;
    blocked(&servers).await;
    frozen(&servers).await;
}

/// A memory alarm: the broker reads nothing more from a connection that publishes.
async fn blocked(servers: &Servers) {
    let mut bed = servers.bed().await;
    bed.set_ladder(1, 50);
    bed.set("http.listen", "127.0.0.1:0");
    fail_666(&bed).await;
    let service = bed.spawn(&["consume"]);
    let endpoint = Endpoint::of(&service).await;
    let lock = bed.side_session("lock table reservation in access exclusive mode").await;
    bed.broker.publish(Order::EVENT, Order::of("666").body()).await;
    bed.broker.publish_all(Order::EVENT, Order::many(30).iter().map(Order::body)).await;
    bed.blocked(1).await;
    servers.rabbitmqctl(&["set_vm_memory_high_watermark", "absolute", "1"]).await;
    bed.broker.reconnect().await; // as one that does not publish
    drop(lock);
    bed.has_processed(30).await;
    service.has_said("the broker blocks publishing").await;
    assert_eq!(endpoint.metric("stock_service_publishing_blocked").await, 1.0);
    servers.rabbitmqctl(&["set_vm_memory_high_watermark", "0.4"]).await;
    let failure_queue = bed.broker.failure_queue();
    eventually("it is parked", async || bed.broker.depth(&failure_queue).await > 0).await;
    eventually("nothing is left", async || bed.broker.in_work().await == 0).await;
    assert_eq!(endpoint.metric("stock_service_publishing_blocked").await, 0.0);
    ends(service).await;
    bed.drain().await;
    let copies = bed.broker.take(&failure_queue).await;
    assert!(copies.len() <= 2, "at most one surplus copy, not {}", copies.len() - 1);
    bed.finish().await;
}

/// The time stops for the broker between a publish and its confirm.
async fn frozen(servers: &Servers) {
    let mut bed = servers.bed().await;
    bed.set_ladder(1, 50);
    let gate = Arc::new(Semaphore::new(0));
    let (order, held) = (Order::new(1), gate.clone());
    let script = Scripted::only(&order.event_id, move |_| Step::held_and_failed(&held));
    let service = bed.start_with(script.clone()).await;
    bed.broker.publish_all(Order::EVENT, ["no event".to_owned()]).await;
    bed.broker.failed(1).await; // the connection for copies is there
    bed.broker.publish(Order::EVENT, order.body()).await;
    script.entered().await;
    servers.rabbitmq().freeze().await;
    gate.add_permits(10);
    // The fault's own duration: longer than any answer is waited for.
    tokio::time::sleep(Duration::from_secs(25)).await;
    servers.rabbitmq().thaw().await;
    bed.broker.reconnect().await;
    eventually("it is parked", async || bed.broker.depth(&bed.broker.failure_queue()).await > 0).await;
    eventually("nothing is left", async || bed.broker.in_work().await == 0).await;
    service.stop().await;
    bed.drain_with(script.clone()).await;
    let copies = bed.broker.take(&bed.broker.failure_queue()).await;
    assert!(copies.len() <= 2, "at most one surplus copy, not {}", copies.len() - 1);
    assert!(copies.iter().all(|copy| copy.body == order.body().as_bytes()));
    assert!(script.attempts(&order.event_id).len() <= 4, "{:?}", script.attempts(&order.event_id));
    bed.finish().await;
}
