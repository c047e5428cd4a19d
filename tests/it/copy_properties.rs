//! Whatever properties and headers a message has, its copies have them, but for what docs/COPIES.md lists.

use std::collections::BTreeMap;
use std::io::Cursor;

use chrono::Utc;
use lapin::BasicProperties;
use lapin::protocol::basic::{gen_properties, parse_properties};
use lapin::types::{AMQPValue, DecimalValue, FieldArray, FieldTable, ShortString};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use stock_service::broker::headers::{Original, Stamp, copy};
use stock_service::message::Reason;

use crate::copies::decisions;
use crate::support::{Order, Scripted, Step, TestBed, text};

const FRAME_MAX: u32 = 131_072;

/// Text of a short string: empty, ordinary, or as long as it can be.
fn short() -> impl Strategy<Value = ShortString> {
    prop_oneof![
        8 => ".{0,20}".prop_map(ShortString::from),
        1 => Just("".into()),
        1 => Just("n".repeat(255).into()),
    ]
}

/// A value of any type that can come over the wire, nested up to four deep. The broker closes the connection on a float
/// that is no number.
fn value() -> impl Strategy<Value = AMQPValue> {
    use proptest::num::{f32, f64};

    let float = f32::POSITIVE | f32::NEGATIVE | f32::NORMAL | f32::SUBNORMAL | f32::ZERO;
    let double = f64::POSITIVE | f64::NEGATIVE | f64::NORMAL | f64::SUBNORMAL | f64::ZERO;
    let flat = prop_oneof![
        any::<bool>().prop_map(AMQPValue::Boolean),
        any::<i8>().prop_map(AMQPValue::ShortShortInt),
        any::<u8>().prop_map(AMQPValue::ShortShortUInt),
        any::<i16>().prop_map(AMQPValue::ShortInt),
        any::<u16>().prop_map(AMQPValue::ShortUInt),
        any::<i32>().prop_map(AMQPValue::LongInt),
        any::<u32>().prop_map(AMQPValue::LongUInt),
        any::<i64>().prop_map(AMQPValue::LongLongInt),
        any::<u64>().prop_map(AMQPValue::Timestamp),
        float.prop_map(AMQPValue::Float),
        double.prop_map(AMQPValue::Double),
        any::<(u8, u32)>().prop_map(|(scale, value)| AMQPValue::DecimalValue(DecimalValue { scale, value })),
        any::<Vec<u8>>().prop_map(|bytes| AMQPValue::LongString(bytes.into())),
        any::<Vec<u8>>().prop_map(|bytes| AMQPValue::ByteArray(bytes.into())),
        Just(AMQPValue::Void),
    ];
    flat.prop_recursive(4, 32, 4, |inner| {
        let array = proptest::collection::vec(inner.clone(), 0..4);
        let table = proptest::collection::btree_map(short(), inner, 0..4);
        prop_oneof![
            array.prop_map(|values| AMQPValue::FieldArray(FieldArray::from(values))),
            table.prop_map(|entries| AMQPValue::FieldTable(FieldTable::from(entries))),
        ]
    })
}

/// Headers of an application, and some that mean something to a broker. CC is left out: the broker takes only an array of
/// text, and would send it there.
fn headers() -> impl Strategy<Value = BTreeMap<ShortString, AMQPValue>> {
    let known: Vec<_> = decisions().into_iter().map(|(name, _)| name).filter(|name| name != "CC").collect();
    let name = prop_oneof![3 => short(), 1 => proptest::sample::select(known).prop_map(ShortString::from)];
    proptest::collection::btree_map(name, value(), 0..12)
}

/// Properties that the broker lets anybody send.
fn properties() -> impl Strategy<Value = BasicProperties> {
    let texts = proptest::collection::vec(proptest::option::of(short()), 7);
    let numbers = any::<(Option<u8>, Option<u64>)>();
    let mode = proptest::option::of(1..=2_u8);
    let acting = (any::<bool>(), proptest::option::of(headers()));
    (texts, numbers, mode, acting).prop_map(|(texts, (priority, timestamp), mode, (expires, headers))| {
        let mut properties = BasicProperties::default();
        let mut texts = texts.into_iter();
        macro_rules! with {
            ($($with:ident $value:expr),*) => {
                $(if let Some(value) = $value { properties = properties.$with(value); })*
            };
        }
        with!(
            with_content_type texts.next().flatten(), with_correlation_id texts.next().flatten(),
            with_reply_to texts.next().flatten(), with_message_id texts.next().flatten(),
            with_type texts.next().flatten(), with_app_id texts.next().flatten(),
            with_cluster_id texts.next().flatten(), with_priority priority, with_timestamp timestamp,
            with_delivery_mode mode, with_expiration expires.then(|| ShortString::from("3600000")),
            with_headers headers.map(FieldTable::from)
        );
        properties
    })
}

/// What the headers of a copy must be, apart from what the service adds.
fn expected(properties: &BasicProperties) -> BTreeMap<String, AMQPValue> {
    let decisions: BTreeMap<_, _> = decisions().into_iter().collect();
    let headers = properties.headers().iter().flat_map(|table| table.inner());
    let mut expected: BTreeMap<_, _> = headers
        .filter_map(|(name, value)| {
            let kept_as = decisions.get(name.as_str()).cloned().unwrap_or_else(|| Some(name.to_string()))?;
            Some((kept_as, value.clone()))
        })
        .collect();
    if let Some(expiration) = properties.expiration() {
        expected.insert("original-expiration".to_owned(), text(expiration.as_str()));
    }
    expected
}

/// Compares a copy with what its original must have become.
fn is_faithful(copy: &BasicProperties, original: &BasicProperties) {
    // The service's own, and the counts that quorum queues add to what they deliver.
    let added = [
        "x-delivery-count",
        "x-acquired-count",
        "retry-count",
        "failure-reason",
        "failure-detail",
        "failed-at",
        "failed-attempts",
        "original-exchange",
        "original-routing-key",
    ];
    let headers = copy.headers().iter().flat_map(|table| table.inner());
    let headers: BTreeMap<_, _> = headers
        .filter(|(name, _)| !added.contains(&name.as_str()))
        .map(|(name, value)| (name.to_string(), value.clone()))
        .collect();
    assert_eq!(headers, expected(original), "{original:?}");
    macro_rules! kept {
        ($($get:ident),*) => { $(assert_eq!(copy.$get(), original.$get(), "{original:?}");)* };
    }
    kept!(
        content_type,
        content_encoding,
        priority,
        correlation_id,
        reply_to,
        message_id,
        timestamp,
        kind,
        app_id,
        cluster_id
    );
    assert_eq!((copy.delivery_mode(), copy.expiration(), copy.user_id()), (&Some(2), &None, &None));
}

fn wire(properties: &BasicProperties) -> Vec<u8> {
    let mut bytes = vec![0; 4 * FRAME_MAX as usize];
    let buffer = Cursor::new(bytes.as_mut_slice());
    let end = gen_properties(properties)(buffer.into()).expect("properties that can be sent").position;
    bytes.truncate(usize::try_from(end).expect("a size"));
    bytes
}

fn sent(bytes: &[u8]) -> BasicProperties {
    let (rest, properties) = parse_properties(bytes).expect("properties that can be read");
    assert!(rest.is_empty());
    properties
}

proptest! {
    #[test]
    fn any_properties_come_through_a_whole_ladder(properties in properties()) {
        let mut current = sent(&wire(&properties));
        let failure = Stamp::Failure {
            reason: Reason::Rejected,
            detail: "why".to_owned(),
            attempts: 3,
            at: Utc::now(),
        };
        for stamp in [Stamp::Retry(1), Stamp::Retry(2), failure] {
            let original = Original { exchange: "events".into(), routing_key: "key".into(), properties: current };
            current = sent(&wire(&copy(&original, &stamp, FRAME_MAX)));
            is_faithful(&current, &properties);
        }
    }

    #[test]
    fn a_copy_of_any_headers_fits_a_frame(
        sizes in proptest::collection::vec(0..60_000_usize, 0..12), properties in properties(),
    ) {
        let mut headers = properties.headers().clone().unwrap_or_default();
        for (n, size) in sizes.iter().enumerate() {
            headers.insert(format!("large-{n}").into(), AMQPValue::LongString(vec![b'x'; *size].into()));
        }
        let properties = properties.with_headers(headers);
        let original = Original { exchange: "events".into(), routing_key: "key".into(), properties };
        let first = copy(&original, &Stamp::Retry(1), FRAME_MAX);
        // 20 bytes are the frame's own, class, weight and the body's size.
        assert!(wire(&first).len() + 20 <= FRAME_MAX as usize);
        let again = Original { exchange: "".into(), routing_key: "queue".into(), properties: first };
        let second = copy(&again, &Stamp::Retry(1), FRAME_MAX);
        assert_eq!(second, again.properties, "it fits once and for all");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_properties_come_through_the_broker_and_the_whole_ladder() {
    const CASES: u32 = 40;

    let mut bed = TestBed::new().await;
    bed.set_ladder(2, 20);
    let (mut runner, strategy) = (TestRunner::default(), properties());
    let mut originals = BTreeMap::new();
    let service = bed.start_with(Scripted::new(|_, _| Step::Fail)).await;
    for _ in 0..CASES {
        let properties = strategy.new_tree(&mut runner).expect("properties").current();
        let body = Order::new(1).body();
        bed.broker.publish_with(Order::EVENT, &body, properties.clone()).await;
        originals.insert(body.into_bytes(), properties);
    }
    let failed = bed.broker.failed(CASES).await;
    service.stop().await;
    for copy in &failed {
        is_faithful(&copy.properties, &originals[&copy.body]);
    }
    bed.finish().await;
}
