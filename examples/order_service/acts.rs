//! The acts of the piece. Each says in a line or two what it did.

use crate::{broker::Broker, relay, report::grouped, shop::Shop};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Between two looks at servers that aren't there yet.
const PAUSE: Duration = Duration::from_secs(1);

/// Places orders; every fifth changes its status at once, and some of it goes out late.
pub(crate) async fn place(shop: &Shop, orders: usize) -> Result<()> {
    let started = Instant::now();
    let lines = shop.place(orders).await?;
    let changes = shop.change(orders / 5).await?;
    let overtaken = shop.delay_placed_events_of_cancelled_orders().await?;
    println!(
        "{} orders with {} lines in {}; {} of them changed at once ({} events, {} cancelled)",
        number(orders),
        number(lines),
        since(started),
        number(changes.orders),
        number(changes.events),
        number(changes.cancelled),
    );
    println!(
        "out of order in the outbox: {} cancellations before their orders, {} versions after newer ones",
        overtaken, changes.late
    );
    Ok(())
}

pub(crate) async fn change(shop: &Shop, orders: usize) -> Result<()> {
    let changes = shop.change(orders).await?;
    println!(
        "{} orders changed: {} events, {} cancelled; {} versions go out after newer ones",
        number(changes.orders),
        number(changes.events),
        number(changes.cancelled),
        changes.late
    );
    Ok(())
}

pub(crate) async fn relay(shop: &Shop, broker: &Broker) -> Result<()> {
    let started = Instant::now();
    let published = relay::relay(shop, broker).await?;
    println!("{} events published in {}", number(published), since(started));
    Ok(())
}

pub(crate) async fn crash_before_marking(shop: &Shop, broker: &Broker, limit: usize) -> Result<()> {
    let published = relay::crash_before_marking(shop, broker, limit).await?;
    println!("{} events published, none marked as published", number(published));
    Ok(())
}

pub(crate) async fn replay(shop: &Shop, broker: &Broker, period: Duration) -> Result<()> {
    let started = Instant::now();
    let published = relay::replay(shop, broker, period.as_secs_f64()).await?;
    println!("{} events published once more in {}", number(published), since(started));
    Ok(())
}

pub(crate) async fn malformed(shop: &Shop, broker: &Broker) -> Result<()> {
    let messages = relay::malformed(shop, broker).await?;
    let defects: Vec<&str> = messages.iter().map(|message| message.defect).collect();
    println!("{} messages: {}", messages.len(), defects.join(", "));
    Ok(())
}

/// All of them, for a stock service that runs meanwhile.
pub(crate) async fn play(shop: &Shop, broker: &Broker, orders: usize) -> Result<()> {
    println!("\n1. The shop places {} orders, each in one transaction with its event in the outbox", number(orders));
    place(shop, orders).await?;

    println!("\n2. The relay publishes, but crashes before it marks its rows; the next one publishes them again");
    crash_before_marking(shop, broker, orders / 8).await?;
    let second_period = Instant::now();
    relay(shop, broker).await?;

    println!("\n3. The status of many orders changes, some of it out of order");
    change(shop, orders / 4).await?;
    relay(shop, broker).await?;

    println!("\n4. Somebody replays a period: all events since the relay came back after its crash");
    replay(shop, broker, second_period.elapsed()).await?;

    println!("\n5. Messages arrive that no service could obey");
    malformed(shop, broker).await
}

/// Waits for both servers and for a stock service that consumes, however late they are.
pub(crate) async fn wait_for_everybody(
    shop: impl AsyncFn() -> Result<Shop>,
    broker: impl AsyncFn() -> Result<Broker>,
) -> (Shop, Broker) {
    let everybody = async || {
        let (shop, broker) = (shop().await?, broker().await?);
        ensure!(broker.depth(broker.queue()).await?.consumers > 0, "nobody consumes {} yet", broker.queue());
        anyhow::Ok((shop, broker))
    };
    let mut said = String::new();
    loop {
        match everybody().await {
            Ok(found) => return found,
            Err(error) => say_once(&mut said, format!("waiting: {error:#}")),
        }
        sleep(PAUSE).await;
    }
}

/// Says what was not said just before.
pub(crate) fn say_once(said: &mut String, text: String) {
    if *said != text {
        println!("{text}");
        *said = text;
    }
}

fn since(started: Instant) -> String {
    format!("{:.1} s", started.elapsed().as_secs_f64())
}

fn number(number: usize) -> String {
    grouped(i64::try_from(number).unwrap_or(i64::MAX))
}
