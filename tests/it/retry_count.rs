//! The counter of the retries is a header that anybody can write, and bounds every message all the same.

use lapin::types::{AMQPValue, DecimalValue, FieldArray, FieldTable};

use crate::support::{Order, Scripted, Step, TestBed, text, with_headers};

/// Values that count as this many retries.
fn numbers() -> Vec<(AMQPValue, i32)> {
    vec![
        (AMQPValue::ShortShortInt(1), 1),
        (AMQPValue::ShortShortUInt(1), 1),
        (AMQPValue::ShortInt(1), 1),
        (AMQPValue::ShortUInt(1), 1),
        (AMQPValue::LongInt(1), 1),
        (AMQPValue::LongUInt(1), 1),
        (AMQPValue::LongLongInt(1), 1),
        (text("1"), 1),
        (text("2"), 2),
        (AMQPValue::LongInt(0), 0),
        (AMQPValue::ShortShortInt(-1), 0),
        (AMQPValue::LongInt(-5), 0),
        (AMQPValue::LongLongInt(i64::MIN), 0),
    ]
}

/// Values that are no number and count as 0.
fn others() -> Vec<AMQPValue> {
    vec![
        AMQPValue::Double(1.0),
        AMQPValue::Float(2.0),
        AMQPValue::DecimalValue(DecimalValue { scale: 0, value: 1 }),
        AMQPValue::Boolean(true),
        AMQPValue::Void,
        AMQPValue::Timestamp(1),
        AMQPValue::ByteArray(b"1".as_slice().into()),
        AMQPValue::FieldTable(FieldTable::default()),
        AMQPValue::FieldArray(FieldArray::default()),
        text(""),
        text("one"),
        text("1.0"),
        text(" 1"),
        text("0x1"),
        text("+1"),
        text("١"),
        AMQPValue::LongString(b"\xff".as_slice().into()),
    ]
}

/// Values beyond any budget.
fn beyond() -> Vec<AMQPValue> {
    vec![
        AMQPValue::ShortShortUInt(u8::MAX),
        AMQPValue::ShortUInt(u16::MAX),
        AMQPValue::LongInt(3),
        AMQPValue::LongInt(4),
        AMQPValue::LongLongInt(1_000_000),
        AMQPValue::LongInt(i32::MAX),
        AMQPValue::LongUInt(u32::MAX),
        AMQPValue::LongLongInt(i64::MAX),
        text("99999999999999999999999"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_message_is_applied_whatever_its_count_says() {
    let bed = TestBed::new().await;
    let numbers = numbers().into_iter().map(|(value, _)| value);
    let values: Vec<_> = numbers.chain(others()).chain(beyond()).collect();
    for value in &values {
        let headers = with_headers(&[("retry-count", value.clone())]);
        bed.broker.publish_with(Order::EVENT, Order::new(1).body(), headers).await;
    }
    bed.drain().await;
    assert_eq!(usize::try_from(bed.processed().await), Ok(values.len()));
    assert_eq!(bed.broker.in_work().await, 0);
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_is_read_from_any_integer_and_written_as_one_kind() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(3, 3_600_000);
    bed.set("retry.multiplier", "1"); // one queue for all
    let expected: Vec<_> = numbers().into_iter().chain(others().into_iter().map(|value| (value, 0))).collect();
    let orders = Order::many(expected.len());
    for (order, (value, _)) in orders.iter().zip(&expected) {
        let headers = with_headers(&[("retry-count", value.clone())]);
        bed.broker.publish_with(Order::EVENT, order.body(), headers).await;
    }
    bed.drain_with(Scripted::new(|_, _| Step::Fail)).await;
    let copies = bed.broker.take(&bed.broker.retry_queue(3_600_000)).await;
    assert_eq!(copies.len(), expected.len());
    for (order, (value, count)) in orders.iter().zip(&expected) {
        let copy = copies.iter().find(|copy| copy.body == order.body().as_bytes()).expect("its copy");
        assert_eq!(copy.number("retry-count"), count + 1, "{value:?}");
    }
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_beyond_the_budget_leaves_one_attempt() {
    let bed = TestBed::new().await;
    let values = beyond();
    let orders = Order::many(values.len());
    for (order, value) in orders.iter().zip(&values) {
        let headers = with_headers(&[("retry-count", value.clone())]);
        bed.broker.publish_with(Order::EVENT, order.body(), headers).await;
    }
    let script = Scripted::new(|_, _| Step::Fail);
    bed.drain_with(script.clone()).await;
    let failed = bed.broker.failed(u32::try_from(values.len()).expect("a count")).await;
    for order in &orders {
        assert!(!script.attempts(&order.event_id).is_empty(), "at least one attempt");
        let copy = failed.iter().find(|copy| copy.body == order.body().as_bytes()).expect("its copy");
        assert_eq!(copy.text("failure-reason"), "retries-exhausted");
        assert_eq!(copy.header("retry-count"), None);
        assert!(copy.number("failed-attempts") > 0);
    }
    assert_eq!(bed.broker.in_work().await, 0, "none is retried");
    bed.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_that_is_no_number_gives_no_more_than_the_budget() {
    let mut bed = TestBed::new().await;
    bed.set_ladder(2, 20);
    let order = Order::new(1);
    let script = Scripted::new(|_, _| Step::Fail);
    let service = bed.start_with(script.clone()).await;
    let headers = with_headers(&[("retry-count", text("many"))]);
    bed.broker.publish_with(Order::EVENT, order.body(), headers).await;
    bed.broker.failed(1).await;
    service.stop().await;
    assert_eq!(script.attempts(&order.event_id).len(), 3);
    bed.finish().await;
}
