//! Faults of the database's server and of the way to it, each with messages waiting that have no second attempt: whoever
//! is charged with one ends in the failure queue.

use std::time::Duration;

use crate::support::{Order, Proxy, Servers, TestBed, eventually_within};

/// The longest pause, the longest wait for a connection, and what a busy machine adds.
const BACK: Duration = Duration::from_secs(30);

/// What a fault leaves of the time before it: orders that were applied, and many more that wait.
struct Backlog {
    before: Vec<Order>,
    waiting: Vec<Order>,
}

impl Backlog {
    const BEFORE: usize = 50;
    const WAITING: usize = 1_000;

    fn new() -> Self {
        Self { before: Order::many(Self::BEFORE), waiting: Order::many(Self::WAITING) }
    }

    async fn begin(&self, bed: &TestBed) {
        bed.broker.publish_all(Order::EVENT, self.before.iter().map(Order::body)).await;
        bed.has_processed(50).await;
    }

    async fn pile_up(&self, bed: &TestBed) {
        bed.broker.publish_all(Order::EVENT, self.waiting.iter().map(Order::body)).await;
        // A worker has taken some and holds them.
        let taken = async || bed.broker.depth(&bed.broker.queue()).await < 1_000;
        eventually_within(BACK, "the fault was met", taken).await;
    }

    /// The fault is over: the service goes on by itself.
    async fn is_worked_off(&self, bed: &TestBed) {
        eventually_within(BACK, "it goes on", async || bed.processed().await > 50).await;
        bed.has_processed(1_050).await;
        assert_eq!(bed.reservations().await, 1_050);
        assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0, "no attempt was spent");
    }
}

fn strict(mut bed: TestBed) -> TestBed {
    bed.set_ladder(0, 50);
    bed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_stopped_is_waited_for() {
    let servers = Servers::start_postgres().await;
    let bed = strict(servers.bed().await);
    let backlog = Backlog::new();
    let service = bed.start().await;
    backlog.begin(&bed).await;
    servers.postgres().stop().await;
    backlog.pile_up(&bed).await;
    servers.postgres().start().await;
    backlog.is_worked_off(&bed).await;
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_and_recovers_is_waited_for_and_said_once_a_minute() {
    let servers = Servers::start_postgres().await;
    let bed = strict(servers.bed().await);
    let backlog = Backlog::new();
    let service = bed.spawn(&["consume"]);
    backlog.begin(&bed).await;
    servers.postgres().kill().await;
    backlog.pile_up(&bed).await;
    service.has_said("holding").await;
    tokio::time::sleep(Duration::from_secs(5)).await; // how long the outage lasts
    servers.postgres().start().await;
    backlog.is_worked_off(&bed).await;
    service.signal("TERM").await;
    let end = service.end().await;
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert!(end.stderr.lines().count() < 30, "a thousand messages and one outage: {}", end.stderr);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_frozen_for_longer_than_the_timeout_is_waited_for() {
    let servers = Servers::start_postgres().await;
    let mut bed = strict(servers.bed().await);
    bed.set("database.timeout", "1s");
    let backlog = Backlog::new();
    let service = bed.start().await;
    backlog.begin(&bed).await;
    servers.postgres().freeze().await;
    backlog.pile_up(&bed).await;
    tokio::time::sleep(Duration::from_secs(8)).await; // beyond every timeout: a transaction's is two seconds
    servers.postgres().thaw().await;
    backlog.is_worked_off(&bed).await;
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_swallows_everything_is_waited_for() {
    let mut bed = strict(TestBed::new().await);
    let proxy = Proxy::before(bed.variable("DATABASE_URL")).await;
    bed.set("database.url", proxy.url());
    bed.set("database.timeout", "1s");
    let backlog = Backlog::new();
    let service = bed.start().await;
    backlog.begin(&bed).await;
    let before = proxy.accepted();
    proxy.black_hole();
    backlog.pile_up(&bed).await;
    let tried_anew = async || proxy.accepted() > before + 2;
    eventually_within(BACK, "new connections are tried, and get no answer either", tried_anew).await;
    proxy.speak();
    backlog.is_worked_off(&bed).await;
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_in_order_and_without_warning_under_load_cost_no_attempt_and_double_nothing() {
    let servers = Servers::start_postgres().await;
    let mut bed = strict(servers.bed().await);
    bed.set("consume.batch_size", "1"); // who is disturbed stands alone, and would be charged
    // Slow enough for all restarts to come in the middle of work.
    bed.on_reservation("perform pg_sleep(0.002);").await;
    let orders: Vec<_> = (0..1_000).map(|_| Order::new(2)).collect();
    let copies = orders.iter().step_by(10);
    bed.broker.publish_all(Order::EVENT, orders.iter().chain(copies).map(Order::body)).await;
    let service = bed.start().await;
    for round in 0..10 {
        let before = bed.processed().await;
        eventually_within(BACK, "it goes on", async || bed.processed().await >= before + 50).await;
        match round % 2 {
            0 => servers.postgres().stop().await,
            _ => servers.postgres().kill().await,
        }
        servers.postgres().start().await;
    }
    assert!(bed.processed().await < 1_000, "the last restart came too late to disturb anything");
    bed.has_processed(1_000).await;
    service.stop().await;
    bed.drain().await; // the last copies
    assert_eq!((bed.processed().await, bed.reservations().await), (1_000, 2_000));
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 0, "no attempt was spent");
    bed.finish().await;
}

/// What locks the service out, and lets it in again, its user's name for `USER`; its sessions are ended with it.
async fn is_waited_for(lock_out: &str, let_in: &str) {
    let servers = Servers::start_postgres().await; // which asks for passwords
    let mut bed = strict(servers.bed().await);
    let user = bed.demote().await;
    bed.set("database.migrate_on_start", "false");
    let backlog = Backlog::new();
    let service = bed.start().await;
    backlog.begin(&bed).await;
    bed.execute(&format!(
        "{}; select count(pg_terminate_backend(pid)) from pg_stat_activity where usename = '{user}'",
        lock_out.replace("USER", &user)
    ))
    .await;
    backlog.pile_up(&bed).await;
    // How long the fault lasts: longer than a connection from the pool is waited for.
    tokio::time::sleep(Duration::from_secs(7)).await;
    bed.execute(&let_in.replace("USER", &user)).await;
    backlog.is_worked_off(&bed).await;
    service.stop().await;
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_is_wrong_for_a_while_is_waited_for() {
    is_waited_for("alter role USER password 'other'", "alter role USER password 'S3CR3T-user'").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_free_connection_is_waited_for() {
    is_waited_for("alter role USER connection limit 0", "alter role USER connection limit -1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_and_copies_are_no_error_to_the_server() {
    let servers = Servers::start_postgres().await;
    let bed = servers.bed().await;
    let orders = Order::many(100);
    for _ in 0..3 {
        bed.broker.publish_all(Order::EVENT, orders.iter().chain(&orders).map(Order::body)).await;
        bed.drain().await;
    }
    assert_eq!((bed.processed().await, bed.reservations().await), (100, 100));
    let log = servers.postgres_log();
    assert!(!log.contains("ERROR"), "{log}");
    // The log would have shown it.
    bed.execute("do $$ begin perform 1/0; exception when division_by_zero then raise warning 'ERROR'; end $$").await;
    assert!(servers.postgres_log().contains("ERROR"));
    bed.finish().await;
}
