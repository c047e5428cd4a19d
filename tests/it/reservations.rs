//! What is stored equals what was sent.

use std::collections::BTreeMap;

use crate::support::{Order, TestBed};

#[tokio::test(flavor = "multi_thread")]
async fn a_quantity_is_stored_with_the_value_that_was_sent() {
    let bed = TestBed::new().await;
    let mut sent: Vec<String> = [
        "2.000",
        "2",
        "2.0",
        "0.001",
        "0.010",
        "9999.999",
        "10000",
        "100000000",
        "999999999.999",
        "0002",
        "000000001.5",
        "1",
        "10",
        "100",
        "1000",
        "1000000",
        "10000000",
        "0.1",
        "0.01",
        "0.100",
        "10000.0",
        "99999.999",
        "100000.001",
    ]
    .map(str::to_owned)
    .to_vec();
    for _ in 0..2_000 {
        let (integer, decimals) = (fastrand::u32(0..1_000_000_000), fastrand::u32(0..1_000));
        sent.push(match fastrand::u8(0..4) {
            0 => format!("{}", integer.max(1)),
            1 => format!("{integer}.{}", decimals / 100 % 9 + 1),
            2 => format!("{integer}.{:02}", decimals / 10 % 99 + 1),
            _ => format!("{integer}.{:03}", decimals % 999 + 1),
        });
    }
    let mut order = Order::new(sent.len());
    for (line, quantity) in order.lines.iter_mut().zip(&sent) {
        line.1.clone_from(quantity);
    }
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain().await;
    let rows: Vec<(String, String)> = sqlx::query_as("select product_id::text, quantity::text from reservation")
        .fetch_all(&bed.pool)
        .await
        .expect("rows");
    let stored: BTreeMap<_, _> = rows.into_iter().collect();
    assert_eq!(stored.len(), sent.len());
    for (product, quantity) in &order.lines {
        assert_eq!(stored[product], exact(quantity), "{quantity}");
    }
    bed.finish().await;
}

/// The quantity as `numeric(12,3)` shows it, by text alone.
fn exact(quantity: &str) -> String {
    let (integer, decimals) = quantity.split_once('.').unwrap_or((quantity, ""));
    let integer = integer.trim_start_matches('0');
    format!("{}.{decimals:0<3}", if integer.is_empty() { "0" } else { integer })
}

#[tokio::test(flavor = "multi_thread")]
async fn two_lines_of_one_product_are_two_reservations() {
    let bed = TestBed::new().await;
    let mut order = Order::new(3);
    let product = order.lines[0].0.clone();
    order.lines[1].0.clone_from(&product);
    order.lines[2].0 = product.to_uppercase();
    bed.broker.publish(Order::EVENT, order.body()).await;
    bed.drain().await;
    let sql =
        "select count(*) || ' ' || count(distinct id) || ' ' || count(distinct product_id) || ' ' || sum(quantity)
               from reservation";
    assert_eq!(bed.text(sql).await.as_deref(), Some("3 3 1 7.500"));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_has_an_id_of_version_7_and_the_databases_time() {
    let bed = TestBed::new().await;
    bed.broker.publish(Order::EVENT, Order::new(5).body()).await;
    bed.drain().await;
    assert_eq!(bed.count("select count(*) from reservation where substr(id::text, 15, 1) <> '7'").await, 0);
    let recent = "select count(*) from reservation where reserved_at between now() - interval '5 minutes' and now()";
    assert_eq!(bed.count(recent).await, 5);
    let recent =
        "select count(*) from processed_event where processed_at between now() - interval '5 minutes' and now()";
    assert_eq!(bed.count(recent).await, 1);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tables_themselves_refuse_what_is_no_quantity() {
    let bed = TestBed::new().await;
    for quantity in ["'NaN'", "0", "-1", "1000000000", "null"] {
        let insert = sqlx::AssertSqlSafe(format!(
            "insert into reservation (id, order_id, product_id, quantity)
             values (gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), {quantity})"
        ));
        assert!(sqlx::raw_sql(insert).execute(&bed.pool).await.is_err(), "{quantity}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tables_have_the_columns_that_others_rely_on() {
    let bed = TestBed::new().await;
    let sql = "select string_agg(table_name || '.' || column_name || ' ' || data_type ||
                                 case is_nullable when 'YES' then ' null' else '' end, ', ' order by table_name, column_name)
               from information_schema.columns
               where table_name in ('processed_event', 'reservation', 'order_status')";
    let columns = bed.text(sql).await.expect("columns");
    for column in [
        "order_status.cancelled_at timestamp with time zone null",
        "order_status.order_id uuid",
        "order_status.status text",
        "order_status.updated_at timestamp with time zone",
        "order_status.version bigint",
        "processed_event.event_id uuid",
        "processed_event.processed_at timestamp with time zone",
        "reservation.id uuid",
        "reservation.order_id uuid",
        "reservation.product_id uuid",
        "reservation.quantity numeric",
        "reservation.released_at timestamp with time zone null",
        "reservation.reserved_at timestamp with time zone",
    ] {
        assert!(columns.split(", ").any(|given| given == column), "{column} is missing in {columns}");
    }
    bed.finish().await;
}
