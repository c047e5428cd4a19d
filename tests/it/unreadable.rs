//! A message that the client cannot even read costs its connection, and comes to its end all the same.

use std::time::Duration;

use lapin::{Connection, ConnectionProperties};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Order, TestBed, eventually, eventually_within, text, with_headers};

/// What the relay makes no text of.
const MARK: &[u8] = b"MARK-OF-A-NAME";

/// The broker behind a relay that spoils one name of what is sent: no client would send it so.
async fn spoiling_relay(url: &str) -> String {
    let mut url = url::Url::parse(url).expect("a URL");
    let broker = (url.host_str().expect("a host").to_owned(), url.port().unwrap_or(5672));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    url.set_host(Some("127.0.0.1")).expect("a host");
    url.set_port(Some(listener.local_addr().expect("an address").port())).expect("a port");
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.expect("a client");
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_broker, mut to_broker) = TcpStream::connect(broker).await.expect("the broker").into_split();
        tokio::spawn(async move { tokio::io::copy(&mut from_broker, &mut to_client).await });
        let mut sent = Vec::new();
        while from_client.read_buf(&mut sent).await.is_ok_and(|bytes| bytes > 0) {
            if let Some(at) = sent.windows(MARK.len()).position(|part| part == MARK) {
                sent[at] = 0xff;
            }
            to_broker.write_all(&sent).await.expect("the broker");
            sent.clear();
        }
    });
    url.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_whose_name_is_no_text_wears_out_and_its_neighbours_are_applied() {
    let bed = TestBed::new().await;
    let relay = spoiling_relay(bed.variable("AMQP_URL")).await;
    let connection = Connection::connect(&relay, ConnectionProperties::default()).await.expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    let (poison, innocents) = (Order::new(1), Order::many(20));
    let (before, after) = innocents.split_at(10);
    bed.broker.publish_all(Order::EVENT, before.iter().map(Order::body)).await;
    let headers = with_headers(&[(std::str::from_utf8(MARK).expect("text"), text("x"))]);
    bed.broker.send_on(&channel, &bed.broker.exchange(), Order::EVENT, poison.body().as_bytes(), headers).await;
    bed.broker.publish_all(Order::EVENT, after.iter().map(Order::body)).await;
    let service = bed.start().await;
    bed.has_processed(20).await;
    // Thirty deliveries with hardly a pause, whatever was under way when the connection ended; with the pauses of an
    // outage they take more than half a minute.
    let over = async || bed.broker.depth(&bed.broker.failure_queue()).await > 0;
    eventually_within(Duration::from_secs(20), "the poison is over", over).await;
    eventually("nothing waits", async || bed.broker.depth(&bed.broker.queue()).await == 0).await;
    service.stop().await;
    assert_eq!(bed.broker.depth(&bed.broker.failure_queue()).await, 1, "the poison, and no neighbour");
    // This test's client cannot read it either.
    bed.broker.delete(&bed.broker.failure_queue()).await;
    bed.broker.account_for(1);
    bed.finish().await;
}
