//! The network between the service and the broker: silent, slow, half closed, closed for long, or leading elsewhere.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::{Order, PATIENCE, Process, Proxy, Scripted, Step, TestBed, Way, eventually, eventually_within};

/// A second between heartbeats, and as long for a connection to be made.
const IMPATIENT: &str = "?heartbeat=1&connection_timeout=1000";

/// A bed whose service talks to the broker through a proxy, with these parameters of the URL.
async fn proxied_bed(parameters: &str) -> (TestBed, Proxy) {
    let mut bed = TestBed::new().await;
    let proxy = Proxy::before(bed.variable("AMQP_URL")).await;
    bed.set("amqp.url", &format!("{}{parameters}", proxy.url()));
    (bed, proxy)
}

/// Waits until it connects again, three heartbeats at most and the first pause after the fault.
async fn is_noticed(proxy: &Proxy, what: &str, fault: impl FnOnce()) {
    let before = proxy.accepted();
    fault();
    eventually_within(Duration::from_secs(3 + 3), what, async || proxy.accepted() > before).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_is_noticed_within_three_heartbeats() {
    let (bed, proxy) = proxied_bed(IMPATIENT).await;
    let service = bed.start().await;
    let silences: [(&str, &dyn Fn()); 3] = [
        ("silence both ways is noticed", &|| proxy.black_hole()),
        ("the broker's silence is noticed", &|| proxy.silence(Way::ToClient)),
        ("the broker notices silence", &|| proxy.silence(Way::ToServer)),
    ];
    for (n, (what, silence)) in (1..).zip(silences) {
        is_noticed(&proxy, what, silence).await;
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        proxy.speak();
        bed.has_processed(n).await;
    }
    service.stop().await;
    bed.drain().await; // the last one may have lost its acknowledgement, and be back
    assert_eq!(bed.reservations().await, 3);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_ends_one_way_is_noticed_at_once() {
    let (bed, proxy) = proxied_bed("").await;
    let service = bed.start().await;
    for (n, way) in [(1, Way::ToClient), (2, Way::ToServer)] {
        is_noticed(&proxy, "the end of a stream is noticed", || proxy.half_close(way)).await;
        bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
        bed.has_processed(n).await;
    }
    service.stop().await;
    bed.drain().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_waits_for_long_costs_no_connection() {
    let (bed, proxy) = proxied_bed(IMPATIENT).await;
    let service = bed.start().await;
    let lock = bed.hold_reservations().await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.blocked(1).await;
    // The fault's own duration: more than three heartbeats.
    tokio::time::sleep(Duration::from_secs(4)).await;
    drop(lock);
    bed.has_processed(1).await;
    assert_eq!(proxy.accepted(), 1);
    service.stop().await;
    assert_eq!(bed.broker.in_work().await, 0, "it is acknowledged on the connection that it came by");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_network_only_costs_time() {
    let (mut bed, proxy) = proxied_bed("").await;
    bed.set_ladder(1, 50);
    for way in [Way::ToServer, Way::ToClient] {
        proxy.delay(way, Duration::from_millis(30));
    }
    let failing = Order::new(1);
    let service = bed.start_with(Scripted::only(&failing.event_id, |_| Step::Fail)).await;
    let orders = Order::many(20);
    let bodies = orders.iter().chain(&orders[..3]).chain([&failing]).map(Order::body);
    bed.broker.publish_all(Order::EVENT, bodies.chain(["no event".to_owned()])).await;
    bed.has_processed(20).await;
    bed.broker.failed(2).await;
    service.stop().await;
    assert_eq!(proxy.accepted(), 2, "one connection to consume, one to publish");
    assert_eq!((bed.reservations().await, bed.broker.in_work().await), (20, 0));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_for_long_is_tried_at_a_bounded_rate_and_found_again() {
    const ATTEMPTS: usize = 6;

    let (bed, proxy) = proxied_bed("").await;
    let service = bed.start().await;
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    let (begun, before) = (Instant::now(), proxy.accepted());
    proxy.turn_away(true);
    eventually("it tries again and again", async || proxy.accepted() >= before + ATTEMPTS).await;
    // Ten a minute, when the pauses have grown: 1, 2, 4, 8, 8 and 8 seconds, less what a clock may round.
    assert!(begun.elapsed() > Duration::from_secs(25), "{ATTEMPTS} attempts in {:?}", begun.elapsed());
    proxy.turn_away(false);
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(2).await;
    service.stop().await;
    bed.finish().await;
}

/// Stops it in the state that it is in.
async fn stops_at_once(service: Process) {
    let begun = Instant::now();
    service.signal("TERM").await;
    let end = service.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}: {}", begun.elapsed(), end.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_never_speaks_costs_no_socket() {
    let (mut bed, proxy) = proxied_bed("?connection_timeout=100").await;
    bed.set("purge.enabled", "false"); // or its connection to PostgreSQL could come after the count
    proxy.black_hole();
    let service = bed.spawn(&["consume"]);
    service.has_said("no answer within").await;
    let sockets = service.sockets();
    eventually("it tries again and again", async || proxy.accepted() >= 5).await;
    // One attempt may be under way.
    eventually("as many sockets as before", async || service.sockets() <= sockets).await;
    stops_at_once(service).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_never_speaks_is_given_up_and_tried_again() {
    let (mut bed, proxy) = proxied_bed("?connection_timeout=100").await;
    proxy.black_hole();
    let mut service = bed.spawn(&["consume"]);
    service.has_said("no answer within").await;
    assert!(service.is_running());
    proxy.speak();
    bed.broker.publish(Order::EVENT, Order::new(1).body()).await;
    bed.has_processed(1).await;
    stops_at_once(service).await;

    // In the middle of an attempt, which lasts ten seconds if nobody ends it.
    bed.set("amqp.url", proxy.url());
    proxy.black_hole();
    let (before, service) = (proxy.accepted(), bed.spawn(&["consume"]));
    eventually("it connects", async || proxy.accepted() > before).await;
    stops_at_once(service).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_while_it_waits_to_connect_again_ends_at_once() {
    let (bed, proxy) = proxied_bed("").await;
    let service = bed.spawn(&["consume"]);
    eventually("it consumes", async || bed.broker.consumers().await > 0).await;
    let before = proxy.accepted();
    proxy.turn_away(true);
    eventually("the pauses are long", async || proxy.accepted() >= before + 3).await;
    stops_at_once(service).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_a_port_that_speaks_none_is_given_up() {
    let mut bed = TestBed::new().await;
    let proxy = Proxy::before(&bed.variable("AMQP_URL").replace("amqp:", "amqps:")).await;
    bed.set("amqp.url", proxy.url());
    let mut service = bed.spawn(&["consume"]);
    service.has_said("cannot connect").await;
    eventually("it tries again", async || proxy.accepted() >= 2).await;
    assert!(service.is_running());
    stops_at_once(service).await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_breaks_at_a_publish_loses_no_message_and_spends_no_attempt() {
    let (mut bed, proxy) = proxied_bed(IMPATIENT).await;
    bed.set_ladder(2, 50);
    let (failing, innocents) = (Order::new(1), Order::many(10));
    let script = Scripted::only(&failing.event_id, |_| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    proxy.fall_silent_at_a_publish();
    bed.broker.publish(Order::EVENT, failing.body()).await;
    eventually("the copy is on its way", async || proxy.is_silent()).await;
    let before = proxy.accepted();
    eventually("the silence is noticed", async || proxy.accepted() > before).await;
    proxy.speak();
    bed.broker.publish_all(Order::EVENT, innocents.iter().map(Order::body)).await;
    bed.has_processed(10).await;
    eventually("it is parked", async || bed.broker.depth(&bed.broker.failure_queue()).await > 0).await;
    eventually("nothing is left", async || bed.broker.in_work().await == 0).await;
    service.stop().await;
    assert_eq!(bed.broker.failed(1).await[0].body, failing.body().as_bytes());
    let attempts = script.attempts(&failing.event_id).len();
    assert!((3..=4).contains(&attempts), "{attempts} attempts: three, and one more for the cut");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_window_is_as_narrow_after_a_reconnect() {
    let (mut bed, proxy) = proxied_bed("").await;
    bed.set("consume.workers", "1");
    bed.set("consume.prefetch", "5");
    let service = bed.start().await;
    bed.broker.publish_all(Order::EVENT, Order::many(50).iter().map(Order::body)).await;
    bed.has_processed(50).await; // the window is open
    for _ in 0..2 {
        let lock = bed.hold_reservations().await;
        bed.broker.publish_all(Order::EVENT, Order::many(50).iter().map(Order::body)).await;
        bed.blocked(1).await;
        let ready = bed.broker.depth(&bed.broker.queue()).await;
        assert!((45..50).contains(&ready), "{ready} of 50 are not taken");
        proxy.cut();
        eventually("it is gone", async || bed.broker.consumers().await == 0).await;
        drop(lock);
        eventually("all are done", async || bed.broker.in_work().await == 0).await;
        eventually("all are done", async || bed.processed().await % 50 == 0).await;
    }
    service.stop().await;
    assert_eq!(bed.reservations().await, 150);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_its_connection_wears_out_and_none_of_its_neighbours_does() {
    let (mut bed, proxy) = proxied_bed("").await;
    bed.set("consume.workers", "2");
    bed.set("consume.prefetch", "4"); // a neighbour shares at most four windows with the culprit, until it stands alone
    // Our own queue but for its limit, which is a fifth: it is the pauses between connections that take long.
    bed.set("amqp.declare", "false");
    bed.broker.replace_queue_with_limit(6).await;
    proxy.cut_at("poison");
    let (poison, orders) = ("poison".to_owned(), Order::many(60));
    let (before, after) = orders.split_at(30);
    let bodies = before.iter().map(Order::body).chain([poison]).chain(after.iter().map(Order::body));
    bed.broker.publish_all(Order::EVENT, bodies).await;
    let service = bed.start().await;
    // The pauses between seven connections add up to 31 s, and by their jitter to 62 s at most.
    eventually_within(2 * PATIENCE, "its neighbours are applied", async || bed.processed().await == 60).await;
    assert_eq!(bed.broker.failed(1).await[0].body, b"poison");
    assert_eq!(proxy.cuts(), 7, "as often as the limit allows");
    service.stop().await;
    assert_eq!(bed.reservations().await, 60);
    bed.finish().await;
}
