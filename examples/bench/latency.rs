//! What a lone event waits for, from its publication to its commit.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Context;
use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use uuid::Uuid;

use crate::load::{Ids, Mix, Order, Publisher};
use crate::world::{Queue, World};

/// Events that open the window before anything is measured.
const WARM_UP: u64 = 5_000;

/// Orders of this section have numbers from here on.
const FIRST: u64 = 900_000_000;

/// Latencies of many events.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<Duration>);

impl Latencies {
    /// The latency that so many of a thousand events stay below.
    pub fn quantile(&self, per_mille: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted.get((sorted.len() * per_mille / 1000).min(sorted.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

/// From the publication of an event to the moment in which another session sees it processed, at so many events a second.
pub async fn publish_to_commit(world: &World, queue: Queue, a_second: u32, seconds: u32) -> anyhow::Result<Latencies> {
    world.empty_tables().await?;
    world.load(queue, FIRST, WARM_UP, Mix { copies_percent: 0, ..Mix::ORDINARY }).await?;
    let service = world.start(queue, &[], false)?;
    while world.count("select count(*) from processed_event").await? < WARM_UP {
        sleep(Duration::from_millis(100)).await;
    }
    let (published, watched) = mpsc::unbounded_channel();
    let watch = tokio::spawn(watch(world.pool.clone(), watched, a_second));
    let mut publisher = Publisher::connect(&world.broker, &queue.name()).await?;
    let mut ticks = ticks(a_second);
    for number in 0..a_second * seconds {
        let order = Order::new(FIRST + WARM_UP + u64::from(number), Ids::V7, None);
        ticks.tick().await;
        published.send((order.event_id, Instant::now()))?;
        publisher.publish(&order.body).await?;
    }
    publisher.finish().await?;
    drop(published);
    let latencies = watch.await??;
    world.stop(service).await?;
    Ok(latencies)
}

/// Looks for events until all are there.
///
/// Events that are far apart are looked for without a pause. Where they are close the looking would cost more than what
/// it looks for, so it pauses for a millisecond, and what it finds may be that much older.
async fn watch(
    pool: sqlx::PgPool,
    mut published: mpsc::UnboundedReceiver<(Uuid, Instant)>,
    a_second: u32,
) -> anyhow::Result<Latencies> {
    let mut connection = pool.acquire().await?;
    let mut pending: HashMap<Uuid, Instant> = HashMap::new();
    let mut latencies = Vec::new();
    loop {
        if pending.is_empty() {
            let Some((id, at)) = published.recv().await else { return Ok(Latencies(latencies)) };
            pending.insert(id, at);
        }
        while let Ok((id, at)) = published.try_recv() {
            pending.insert(id, at);
        }
        let ids: Vec<_> = pending.keys().copied().collect();
        let found: Vec<Uuid> = sqlx::query_scalar("select event_id from processed_event where event_id = any($1)")
            .bind(&ids)
            .fetch_all(&mut *connection)
            .await?;
        let now = Instant::now();
        latencies.extend(found.iter().filter_map(|id| pending.remove(id)).map(|at| now - at));
        if a_second > 10 {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

/// A transaction with the least that a consumer needs: the guard's row and the lines of one order.
pub async fn bare_transaction(world: &World, a_second: u32, seconds: u32) -> anyhow::Result<Latencies> {
    let mut connection = world.pool.acquire().await?;
    let mut latencies = Vec::new();
    let mut ticks = ticks(a_second);
    for _ in 0..a_second * seconds {
        let ids: Vec<_> = (0..4).map(|_| Uuid::now_v7()).collect();
        ticks.tick().await;
        let begun = Instant::now();
        sqlx::raw_sql("begin").execute(&mut *connection).await?;
        sqlx::query("insert into processed_event (event_id) values ($1) on conflict do nothing returning event_id")
            .bind(ids[0])
            .execute(&mut *connection)
            .await?;
        sqlx::query(
            "insert into reservation (id, order_id, product_id, quantity)
             select line, $1, line, 2.5 from unnest($2::uuid[]) as line",
        )
        .bind(ids[0])
        .bind(&ids[1..])
        .execute(&mut *connection)
        .await?;
        sqlx::raw_sql("commit").execute(&mut *connection).await?;
        latencies.push(begun.elapsed());
    }
    Ok(Latencies(latencies))
}

/// A persistent message through a queue of the same kind, and nothing done with it.
pub async fn bare_round_trip(world: &World, queue: Queue, a_second: u32, seconds: u32) -> anyhow::Result<Latencies> {
    const ECHO: &str = "bench.echo";
    let connection = Connection::connect(world.broker.as_str(), ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString(queue.kind().into()));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(ECHO.into(), durable, arguments).await?;
    channel.basic_qos(1, BasicQosOptions::default()).await?;
    let consume = channel.basic_consume(ECHO.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default());
    let mut deliveries = consume.await?;
    let mut publisher = Publisher::connect(&world.broker, ECHO).await?;
    let mut latencies = Vec::new();
    let mut ticks = ticks(a_second);
    for number in 0..a_second * seconds {
        let order = Order::new(FIRST + u64::from(number), Ids::V7, None);
        ticks.tick().await;
        let begun = Instant::now();
        publisher.publish(&order.body).await?;
        let delivery = deliveries.next().await.context("the queue has ended")??;
        latencies.push(begun.elapsed());
        delivery.ack(BasicAckOptions::default()).await?;
    }
    publisher.finish().await?;
    channel.queue_delete(ECHO.into(), QueueDeleteOptions::default()).await?;
    Ok(Latencies(latencies))
}

/// From the start of the process to the commit of an event that waits, with tables and queues in place.
pub async fn start_to_commit(world: &World, queue: Queue, times: u32) -> anyhow::Result<Latencies> {
    world.empty_tables().await?;
    let mut latencies = Vec::new();
    for number in 0..times {
        let order = Order::new(FIRST + 100_000_000 + u64::from(number), Ids::V7, None);
        let mut publisher = Publisher::connect(&world.broker, &queue.name()).await?;
        publisher.publish(&order.body).await?;
        publisher.finish().await?;
        let begun = Instant::now();
        let service = world.start(queue, &[], false)?;
        while world.count(format!("select count(*) from processed_event where event_id = '{}'", order.event_id)).await?
            == 0
        {
            sleep(Duration::from_millis(1)).await;
        }
        latencies.push(begun.elapsed());
        world.stop(service).await?;
    }
    Ok(Latencies(latencies))
}

fn ticks(a_second: u32) -> tokio::time::Interval {
    let mut ticks = interval(Duration::from_secs(1) / a_second);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst); // what is late does not slow down the rest
    ticks
}
