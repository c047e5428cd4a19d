//! What the database can do by itself: pgbench, with the statements that a consumer cannot do without.

use std::process::Stdio;

use anyhow::{Context, ensure};
use tokio::process::Command;

use crate::load::LINES;
use crate::world::World;

/// Seconds of one measurement.
const SECONDS: u32 = 5;

/// So many events a transaction: the guard's insert, and that of their lines, each prepared.
fn script(events: u32) -> String {
    format!(
        "begin;
insert into processed_event (event_id) select uuidv7() from generate_series(1, {events}) on conflict do nothing returning event_id;
insert into reservation (id, order_id, product_id, quantity) select uuidv7(), uuidv7(), uuidv7(), 2.5 from generate_series(1, {events} * {LINES});
commit;
"
    )
}

/// Events a second that so many clients of pgbench write, with so many events a transaction.
pub async fn pgbench(world: &World, clients: u32, events: u32) -> anyhow::Result<f64> {
    world.empty_tables().await?;
    let file = std::env::temp_dir().join(format!("stock-bench-{}-{events}.sql", std::process::id()));
    std::fs::write(&file, script(events))?;
    let output = Command::new(world.programs.join("pgbench"))
        .args(["--no-vacuum", "--protocol=prepared", "--client"])
        .arg(clients.to_string())
        .arg(format!("--jobs={}", clients.min(2)))
        .arg(format!("--time={SECONDS}"))
        .arg("--file")
        .arg(&file)
        .arg(world.database.as_str())
        .stdin(Stdio::null())
        .output()
        .await
        .context("cannot run pgbench")?;
    std::fs::remove_file(&file)?;
    ensure!(output.status.success(), "pgbench: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let tps = text.lines().find_map(|line| line.strip_prefix("tps = "));
    let tps: f64 = tps.and_then(|rest| rest.split(' ').next()).context("pgbench gave no tps")?.parse()?;
    Ok(tps * f64::from(events))
}

/// PostgreSQL 18 has it; an older one gets its like.
pub async fn make_uuidv7(world: &World) -> anyhow::Result<()> {
    let exists = world
        .count("select count(*) from pg_proc where proname = 'uuidv7' and pronamespace = 'pg_catalog'::regnamespace")
        .await?;
    if exists == 0 {
        let make = "create or replace function uuidv7() returns uuid language sql volatile parallel safe as $$
            select (lpad(to_hex((extract(epoch from clock_timestamp()) * 1000)::bigint), 12, '0')
                    || '7' || substr(r, 1, 3) || '8' || substr(r, 4, 15))::uuid
            from (select replace(gen_random_uuid()::text, '-', '') as r) as random $$";
        world.execute(make).await?;
    }
    Ok(())
}
