//! The copy of each order's state, and the goods of cancelled orders, in whichever order the events arrive.

use crate::support::{Order, StatusChange, TestBed};

/// Status, version and whether it is cancelled, as text.
pub async fn status(bed: &TestBed, order: &Order) -> String {
    let sql = format!(
        "select coalesce((select status || '/' || version || case when cancelled_at is null then '' else ' cancelled' end
                          from order_status where order_id = '{}'), 'unknown')",
        order.order_id
    );
    bed.text(&sql).await.expect("a status")
}

/// Goods held and goods released.
pub async fn goods(bed: &TestBed, order: &Order) -> String {
    let sql = format!(
        "select count(*) filter (where released_at is null) || ' held ' || count(released_at) || ' released'
         from reservation where order_id = '{}'",
        order.order_id
    );
    bed.text(&sql).await.expect("counts")
}

/// Publishes and processes one message after the other.
async fn one_by_one(bed: &TestBed, bodies: impl IntoIterator<Item = (&'static str, String)>) {
    for (event, body) in bodies {
        bed.broker.publish(event, body).await;
        bed.drain().await;
    }
}

/// The event that places the order, and its name.
pub fn placed(order: &Order) -> (&'static str, String) {
    (Order::EVENT, order.body())
}

/// The event of a change of the order, and its name.
pub fn changed(order: &Order, status: &str, version: i64) -> (&'static str, String) {
    (StatusChange::EVENT, StatusChange::new(order, status, version).body())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placed_order_has_the_status_placed_and_version_0() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    one_by_one(&bed, [placed(&order)]).await;
    assert_eq!(status(&bed, &order).await, "placed/0");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_version_after_a_newer_one_changes_nothing() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    let newer = changed(&order, "shipped", 5);
    one_by_one(&bed, [placed(&order), newer, changed(&order, "paid", 4), changed(&order, "packed", 5)]).await;
    assert_eq!(status(&bed, &order).await, "shipped/5", "older ones and a second one of its version change nothing");
    let updated = bed.text("select updated_at::text from order_status").await;
    one_by_one(&bed, [changed(&order, "packed", 5), changed(&order, "paid", 1)]).await;
    assert_eq!(bed.text("select updated_at::text from order_status").await, updated, "not even the time");
    one_by_one(&bed, [changed(&order, "delivered", 6)]).await;
    assert_eq!(status(&bed, &order).await, "delivered/6");
    assert_eq!(goods(&bed, &order).await, "1 held 0 released");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn placing_an_order_late_keeps_what_is_newer() {
    let bed = TestBed::new().await;
    let order = Order::new(2);
    one_by_one(&bed, [changed(&order, "paid", 3), placed(&order)]).await;
    assert_eq!(status(&bed, &order).await, "paid/3");
    assert_eq!(goods(&bed, &order).await, "2 held 0 released");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_an_unknown_order_is_kept() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    one_by_one(&bed, [changed(&order, "paid", i64::MAX)]).await;
    assert_eq!(status(&bed, &order).await, format!("paid/{}", i64::MAX));
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_after_placed_releases_the_goods() {
    let bed = TestBed::new().await;
    let (order, other) = (Order::new(3), Order::new(2));
    one_by_one(&bed, [placed(&order), placed(&other), changed(&order, "cancelled", 1)]).await;
    assert_eq!(status(&bed, &order).await, "cancelled/1 cancelled");
    assert_eq!(goods(&bed, &order).await, "0 held 3 released");
    assert_eq!(goods(&bed, &other).await, "2 held 0 released");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn placed_after_cancelled_holds_no_goods() {
    let bed = TestBed::new().await;
    let order = Order::new(3);
    one_by_one(&bed, [changed(&order, "cancelled", 1), placed(&order)]).await;
    assert_eq!(status(&bed, &order).await, "cancelled/1 cancelled");
    assert_eq!(goods(&bed, &order).await, "0 held 3 released");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_cancellation_releases_all_the_same_and_is_final() {
    let bed = TestBed::new().await;
    let (order, late) = (Order::new(2), Order::new(2));
    one_by_one(&bed, [placed(&order), changed(&order, "shipped", 7), changed(&order, "cancelled", 3)]).await;
    assert_eq!(status(&bed, &order).await, "shipped/7 cancelled", "the newer status stays");
    assert_eq!(goods(&bed, &order).await, "0 held 2 released");
    one_by_one(&bed, [changed(&order, "paid", 9)]).await;
    assert_eq!(status(&bed, &order).await, "paid/9 cancelled", "nothing takes it back");
    one_by_one(&bed, [changed(&late, "shipped", 7), changed(&late, "cancelled", 3), placed(&late)]).await;
    assert_eq!(goods(&bed, &late).await, "0 held 2 released");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancellation_of_the_same_version_releases_and_does_not_replace_the_status() {
    let bed = TestBed::new().await;
    let order = Order::new(2);
    one_by_one(&bed, [placed(&order), changed(&order, "shipped", 5), changed(&order, "cancelled", 5)]).await;
    assert_eq!(status(&bed, &order).await, "shipped/5 cancelled", "of two with one version the first counts");
    assert_eq!(goods(&bed, &order).await, "0 held 2 released");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_cancellation_changes_no_time() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    one_by_one(&bed, [placed(&order), changed(&order, "cancelled", 1)]).await;
    let times = "select cancelled_at || ' ' || released_at from order_status join reservation using (order_id)";
    let first = bed.text(times).await;
    one_by_one(&bed, [changed(&order, "cancelled", 2)]).await;
    assert_eq!(bed.text(times).await, first);
    assert_eq!(status(&bed, &order).await, "cancelled/2 cancelled");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_exact_word_cancels() {
    let bed = TestBed::new().await;
    let order = Order::new(1);
    let words = ["Cancelled", "canceled", "cancelled ", "cancellation"];
    for (word, version) in words.into_iter().zip(1..) {
        one_by_one(&bed, [changed(&order, word, version)]).await;
    }
    one_by_one(&bed, [placed(&order)]).await;
    assert_eq!(goods(&bed, &order).await, "1 held 0 released");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn placed_and_cancelled_in_one_batch_hold_no_goods_in_either_order() {
    let bed = TestBed::new().await;
    let orders: Vec<_> = (0..20).map(|_| Order::new(2)).collect();
    for (n, order) in orders.iter().enumerate() {
        let mut pair = [placed(order), changed(order, "cancelled", 1)];
        if n % 2 == 1 {
            pair.reverse();
        }
        for (event, body) in pair {
            bed.broker.publish(event, body).await;
        }
    }
    bed.drain().await;
    for order in &orders {
        assert_eq!(goods(&bed, order).await, "0 held 2 released");
        assert_eq!(status(&bed, order).await, "cancelled/1 cancelled");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_changes_of_one_order_in_one_batch_end_with_the_newest() {
    let bed = TestBed::new().await;
    let (order, cancelled) = (Order::new(1), Order::new(1));
    let filler = Order::many(8);
    bed.broker.publish_all(Order::EVENT, filler.iter().map(Order::body)).await;
    for (status, version) in [("b", 2), ("e", 5), ("first", 6), ("second", 6), ("a", 1), ("d", 4)] {
        bed.broker.publish(StatusChange::EVENT, StatusChange::new(&order, status, version).body()).await;
        let status = if version == 2 { "cancelled" } else { status };
        bed.broker.publish(StatusChange::EVENT, StatusChange::new(&cancelled, status, version).body()).await;
    }
    bed.broker.publish(Order::EVENT, cancelled.body()).await;
    bed.drain().await;
    assert_eq!(status(&bed, &order).await, "first/6", "of two with one version the first that came");
    assert_eq!(status(&bed, &cancelled).await, "first/6 cancelled");
    assert_eq!(goods(&bed, &cancelled).await, "0 held 1 released");
    bed.finish().await;
}
