//! The stock database and the queues, as the audit sees them: with queries of its own.

use std::time::Duration;

use anyhow::Context;
use lapin::options::{BasicAckOptions, BasicGetOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties};
use sqlx::{Connection as _, PgConnection};
use tokio::time::{Instant, sleep};
use url::Url;
use uuid::Uuid;

use crate::load::Load;

const QUEUE: &str = "stock.events";
pub const FAILURE_QUEUE: &str = "stock.events.failed";

/// Order, product, quantity, whether released.
pub type Reservation = (Uuid, Uuid, String, bool);
/// Order, status, version, whether cancelled.
pub type Status = (Uuid, String, i64, bool);

pub async fn connect(database: &Url) -> anyhow::Result<PgConnection> {
    PgConnection::connect(database.as_str()).await.context("cannot connect to the database")
}

/// Has the database refuse the orders that are to fail for a while.
pub async fn refuse(connection: &mut PgConnection, load: &Load) -> anyhow::Result<()> {
    let schema = "
        create table refused (order_id uuid primary key, until timestamptz not null);
        create function refuse() returns trigger language plpgsql as $refuse$ begin
            if exists (select from refused where order_id = new.order_id and until > clock_timestamp()) then
                raise exception 'refused for a while';
            end if;
            return new;
        end $refuse$;
        create trigger refuse before insert on reservation for each row execute function refuse()";
    sqlx::raw_sql(schema).execute(&mut *connection).await?;
    let refused = load.events.iter().filter_map(|event| Some((event.order_id, event.refused_until?.as_secs_f64())));
    let (orders, seconds): (Vec<_>, Vec<_>) = refused.unzip();
    let insert = "insert into refused
                  select order_id, now() + make_interval(secs => seconds)
                  from unnest($1::uuid[], $2::double precision[]) as refused (order_id, seconds)";
    sqlx::query(insert).bind(orders).bind(seconds).execute(connection).await?;
    Ok(())
}

/// Waits until an event is applied, and says how long that took.
pub async fn applied_after(database: &Url, limit: Duration) -> Option<Duration> {
    let begun = Instant::now();
    let mut before = None;
    let newest = "select processed_at::text from processed_event order by processed_at desc limit 1";
    tokio::time::timeout(limit, async {
        loop {
            // A server that is just starting refuses.
            if let Ok(mut connection) = connect(database).await {
                while let Ok(now) = sqlx::query_scalar::<_, String>(newest).fetch_optional(&mut connection).await {
                    if before.get_or_insert_with(|| now.clone()) != &now {
                        return begun.elapsed();
                    }
                    sleep(Duration::from_millis(20)).await;
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .ok()
}

pub async fn applied(connection: &mut PgConnection) -> anyhow::Result<Vec<Uuid>> {
    Ok(sqlx::query_scalar("select event_id from processed_event").fetch_all(connection).await?)
}

pub async fn reservations(connection: &mut PgConnection) -> anyhow::Result<Vec<Reservation>> {
    let all = "select order_id, product_id, quantity::text, released_at is not null from reservation";
    Ok(sqlx::query_as(all).fetch_all(connection).await?)
}

pub async fn statuses(connection: &mut PgConnection) -> anyhow::Result<Vec<Status>> {
    let all = "select order_id, status, version, cancelled_at is not null from order_status";
    Ok(sqlx::query_as(all).fetch_all(connection).await?)
}

/// Sessions that sit in an open transaction.
pub async fn open_transactions(connection: &mut PgConnection) -> anyhow::Result<i64> {
    let open = "select count(*) from pg_stat_activity where state like 'idle in transaction%'";
    Ok(sqlx::query_scalar(open).fetch_one(connection).await?)
}

/// The audit's own view of the broker.
#[derive(Debug)]
pub struct Queues {
    _connection: Connection,
    channel: Channel,
}

impl Queues {
    pub async fn connect(broker: &Url) -> anyhow::Result<Self> {
        let connection = Connection::connect(broker.as_str(), ConnectionProperties::default()).await?;
        Ok(Self { channel: connection.create_channel().await?, _connection: connection })
    }

    /// How many consume the service's queue.
    pub async fn consumers(&self) -> anyhow::Result<usize> {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(QUEUE.into(), passive, FieldTable::default()).await?;
        Ok(usize::try_from(queue.consumer_count())?)
    }

    /// Takes all messages out of the failure queue: their bodies, and their headers in words.
    pub async fn take_failed(&self) -> anyhow::Result<Vec<(Vec<u8>, String)>> {
        let mut failed = Vec::new();
        while let Some(got) = self.channel.basic_get(FAILURE_QUEUE.into(), BasicGetOptions::default()).await? {
            got.delivery.acker.ack(BasicAckOptions::default()).await?;
            failed.push((got.delivery.data, format!("{:?}", got.delivery.properties.headers())));
        }
        Ok(failed)
    }
}
