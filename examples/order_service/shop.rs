//! The shop's own tables: orders, the outbox, and the log of what was published.

use crate::event::{self, Event, Line, Malformed};
use anyhow::{Context as _, Result};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use sqlx::{PgConnection, PgPool, postgres::PgPoolOptions};
use uuid::Uuid;

/// Customers that order at the same time, each in a transaction of its own.
const AT_ONCE: usize = 8;
const CUSTOMERS: u64 = 500;
const PRODUCTS: u64 = 200;

/// What can become of an order whose status changes.
const CAREERS: [&[&str]; 7] = [
    &["paid"],
    &["paid", "packed"],
    &["paid", "packed", "shipped"],
    &["cancelled"],
    &["paid", "cancelled"],
    // The status moves on, but a cancelled order never gets its goods back. Half of the
    // time "refunded" arrives first: the cancellation is stale then, and must still count.
    &["cancelled", "refunded"],
    &["paid", "cancelled", "refunded"],
];

/// Why a message was published.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Relay,
    CrashedRelay,
    Replay,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Kind::Relay => "relay",
            Kind::CrashedRelay => "crashed-relay",
            Kind::Replay => "replay",
        }
    }
}

/// A row of the outbox, as far as the relay needs it.
#[derive(sqlx::FromRow)]
pub(crate) struct OutboxRow {
    pub(crate) event_id: Uuid,
    pub(crate) name: String,
    pub(crate) order_id: Uuid,
    pub(crate) body: String,
}

/// What a round of changes did.
#[derive(Default)]
pub(crate) struct Changes {
    pub(crate) orders: usize,
    pub(crate) events: usize,
    pub(crate) cancelled: usize,
    /// Events that go out behind one that they should precede.
    pub(crate) late: u64,
}

pub(crate) struct Shop {
    pool: PgPool,
}

impl Shop {
    /// Connects and creates what isn't there yet.
    pub(crate) async fn open(url: &str) -> Result<Self> {
        let pool = PgPoolOptions::new()
            .max_connections(u32::try_from(AT_ONCE)?)
            .connect(url)
            .await
            .context("cannot connect to PostgreSQL")?;
        sqlx::raw_sql(include_str!("schema.sql")).execute(&pool).await.context("cannot create the shop's tables")?;
        Ok(Self { pool })
    }

    pub(crate) fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Places `orders` orders and returns how many lines they have.
    pub(crate) async fn place(&self, orders: usize) -> Result<usize> {
        stream::iter(0..orders).map(|_| self.place_one()).buffer_unordered(AT_ONCE).try_fold(0, add).await
    }

    async fn place_one(&self) -> Result<usize> {
        let (order_id, customer_id) = (Uuid::now_v7(), numbered(0xc, fastrand::u64(1..=CUSTOMERS)));
        let mut lines: Vec<Line> = (0..fastrand::usize(1..=5)).map(|_| line()).collect();
        if fastrand::u8(0..20) == 0 {
            // The same line twice is an order of both, not a duplicate.
            let Line { product_id, quantity } = &lines[0];
            lines.push(Line { product_id: *product_id, quantity: quantity.clone() });
        }
        let products: Vec<Uuid> = lines.iter().map(|line| line.product_id).collect();
        let quantities: Vec<&str> = lines.iter().map(|line| line.quantity.as_str()).collect();

        let mut transaction = self.pool.begin().await?;
        sqlx::query("insert into shop.orders (id, customer_id) values ($1, $2)")
            .bind(order_id)
            .bind(customer_id)
            .execute(&mut *transaction)
            .await?;
        sqlx::query(
            "insert into shop.order_line (order_id, line, product_id, quantity)
             select $1, line, product_id, quantity::numeric
             from unnest($2::uuid[], $3::text[]) with ordinality as given (product_id, quantity, line)",
        )
        .bind(order_id)
        .bind(products)
        .bind(quantities)
        .execute(&mut *transaction)
        .await?;
        store(&mut transaction, &event::order_placed(order_id, customer_id, &lines)).await?;
        transaction.commit().await?;
        Ok(lines.len())
    }

    /// Changes the status of `orders` orders that are not cancelled yet, once or several
    /// times each, and lets some of the events go out late.
    pub(crate) async fn change(&self, orders: usize) -> Result<Changes> {
        let orders: Vec<Uuid> =
            sqlx::query_scalar("select id from shop.orders where cancelled_at is null order by random() limit $1")
                .bind(i64::try_from(orders)?)
                .fetch_all(&self.pool)
                .await?;
        let careers: Vec<(&[&str], Vec<Uuid>)> = stream::iter(orders)
            .map(|order_id| async move {
                let career = CAREERS[fastrand::usize(..CAREERS.len())];
                let mut events = Vec::new();
                for status in career {
                    events.push(self.change_one(order_id, status).await?);
                }
                anyhow::Ok((career, events))
            })
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await?;

        let mut changes = Changes::default();
        let mut late = Vec::new();
        for (career, events) in &careers {
            changes.orders += 1;
            changes.events += events.len();
            changes.cancelled += usize::from(career.contains(&"cancelled"));
            // Half of the careers of several changes: the last but one arrives last.
            if let [.., overtaken, _] = events.as_slice()
                && fastrand::bool()
            {
                late.push(*overtaken);
            }
        }
        changes.late = self.delay(&late).await?;
        Ok(changes)
    }

    async fn change_one(&self, order_id: Uuid, status: &str) -> Result<Uuid> {
        let mut transaction = self.pool.begin().await?;
        let version: i64 = sqlx::query_scalar(
            "update shop.orders
             set status = $2, version = version + 1,
                 cancelled_at = case when $2 = 'cancelled' then now() else cancelled_at end
             where id = $1
             returning version",
        )
        .bind(order_id)
        .bind(status)
        .fetch_one(&mut *transaction)
        .await?;
        let event = event::status_changed(order_id, status, version);
        store(&mut transaction, &event).await?;
        transaction.commit().await?;
        Ok(event.id)
    }

    /// Moves events behind all others, as it happens to a row whose transaction commits
    /// late. Returns how many were still there to be moved.
    async fn delay(&self, events: &[Uuid]) -> Result<u64> {
        let done = sqlx::query(
            "update shop.outbox set position = nextval('shop.outbox_position')
             where event_id = any ($1) and published_at is null",
        )
        .bind(events)
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected())
    }

    /// Moves the placed events of half of the cancelled orders behind their cancellations.
    pub(crate) async fn delay_placed_events_of_cancelled_orders(&self) -> Result<u64> {
        let events: Vec<Uuid> = sqlx::query_scalar(
            "select event_id from shop.outbox join shop.orders on orders.id = order_id
             where cancelled_at is not null and name = $1 and published_at is null and random() < 0.5",
        )
        .bind(event::ORDER_PLACED)
        .fetch_all(&self.pool)
        .await?;
        self.delay(&events).await
    }

    /// The next rows that no relay has marked as published. One relay at a time: nothing
    /// here keeps a second from taking the same rows.
    pub(crate) async fn unpublished(&self, limit: usize) -> Result<Vec<OutboxRow>> {
        let rows = sqlx::query_as(
            "select event_id, name, order_id, body from shop.outbox
             where published_at is null order by position limit $1",
        )
        .bind(i64::try_from(limit)?)
        .fetch_all(&self.pool)
        .await?;
        Ok(rows)
    }

    pub(crate) async fn published_within(&self, seconds: f64) -> Result<Vec<OutboxRow>> {
        let rows = sqlx::query_as(
            "select event_id, name, order_id, body from shop.outbox
             where published_at >= now() - make_interval(secs => $1) order by position",
        )
        .bind(seconds)
        .fetch_all(&self.pool)
        .await?;
        Ok(rows)
    }

    /// Notes that these events are about to be sent, and returns the notes' numbers.
    pub(crate) async fn log_attempts(&self, kind: Kind, rows: &[OutboxRow]) -> Result<Vec<i64>> {
        let numbers = sqlx::query_scalar(
            "insert into shop.publication (kind, event_id) select $1, unnest($2::uuid[]) returning id",
        )
        .bind(kind.as_str())
        .bind(ids(rows))
        .fetch_all(&self.pool)
        .await?;
        Ok(numbers)
    }

    pub(crate) async fn log_malformed(&self, message: &Malformed) -> Result<i64> {
        let number = sqlx::query_scalar(
            "insert into shop.publication (kind, body, defect, expected_reason) values ('malformed', $1, $2, $3)
             returning id",
        )
        .bind(&message.body)
        .bind(message.defect)
        .bind(message.expected_reason)
        .fetch_one(&self.pool)
        .await?;
        Ok(number)
    }

    /// Notes that the broker has confirmed what these notes are about.
    pub(crate) async fn log_confirmed(&self, numbers: &[i64]) -> Result<()> {
        sqlx::query("update shop.publication set confirmed_at = now() where id = any ($1)")
            .bind(numbers)
            .execute(&self.pool)
            .await?;
        Ok(())
    }

    /// What the relay does at the end, and a crashed one doesn't.
    pub(crate) async fn mark_published(&self, rows: &[OutboxRow]) -> Result<()> {
        sqlx::query("update shop.outbox set published_at = now() where event_id = any ($1)")
            .bind(ids(rows))
            .execute(&self.pool)
            .await?;
        Ok(())
    }
}

/// The event goes with the change that it tells of, in the one transaction.
async fn store(connection: &mut PgConnection, event: &Event) -> Result<()> {
    sqlx::query("insert into shop.outbox (event_id, name, order_id, body) values ($1, $2, $3, $4)")
        .bind(event.id)
        .bind(event.name)
        .bind(event.order_id)
        .bind(&event.body)
        .execute(connection)
        .await?;
    Ok(())
}

fn ids(rows: &[OutboxRow]) -> Vec<Uuid> {
    rows.iter().map(|row| row.event_id).collect()
}

async fn add(sum: usize, lines: usize) -> Result<usize> {
    Ok(sum + lines)
}

/// A line with one of the spellings of a quantity that the contract allows.
fn line() -> Line {
    let whole = fastrand::u32(1..=20);
    let quantity = match fastrand::u8(0..6) {
        0 => format!("{whole}"),
        1 => format!("{whole}.000"),
        2 => format!("{whole}.5"),
        3 => format!("0.{whole:03}"),
        4 => format!("{whole:09}.25"),
        _ => format!("{}.999", 999_999_999 - whole),
    };
    Line { product_id: numbered(0xa, fastrand::u64(1..=PRODUCTS)), quantity }
}

/// Customers and products have lived for long: their ids are fixed ones.
fn numbered(family: u16, number: u64) -> Uuid {
    Uuid::from_fields(0x0193_9c5e, family, 0x7000, &(0x8000_0000_0000_0000 | number).to_be_bytes())
}
