//! A TCP proxy before the broker that can lose what the service says.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

/// `basic.ack`: class 60, method 80, at the beginning of a method frame's payload.
const ACKNOWLEDGEMENT: [u8; 4] = [0, 60, 0, 80];

/// Forwards all connections to the broker until it is dropped.
#[derive(Debug)]
pub struct Proxy {
    url: String,
    loses_acknowledgements: Arc<AtomicBool>,
    _accepting: AbortOnDropHandle<()>,
}

impl Proxy {
    /// A proxy before the broker at this URL.
    pub async fn before(broker: &str) -> Self {
        let mut url = url::Url::parse(broker).expect("a URL");
        let broker = format!("{}:{}", url.host_str().expect("a host"), url.port().unwrap_or(5672));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        url.set_host(Some("127.0.0.1")).expect("a host");
        url.set_port(Some(listener.local_addr().expect("an address").port())).expect("a port");
        let loses_acknowledgements = Arc::new(AtomicBool::new(false));
        let loses = loses_acknowledgements.clone();
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&broker).await else { continue };
                let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
                connections.spawn(say(from_client, to_server, loses.clone()));
                connections.spawn(hear(from_server, to_client));
            }
        });
        Self { url: url.into(), loses_acknowledgements, _accepting: AbortOnDropHandle::new(accepting) }
    }

    /// The broker's URL by way of this proxy.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// From now on no acknowledgement of the service's arrives.
    pub fn lose_acknowledgements(&self) {
        self.loses_acknowledgements.store(true, Ordering::SeqCst);
    }
}

/// From the service to the broker, frame by frame.
async fn say(mut client: OwnedReadHalf, mut server: OwnedWriteHalf, loses: Arc<AtomicBool>) -> std::io::Result<()> {
    let mut greeting = [0; 8];
    client.read_exact(&mut greeting).await?;
    server.write_all(&greeting).await?;
    loop {
        // Type, channel, size; the payload; an end mark.
        let mut frame = vec![0; 7];
        client.read_exact(&mut frame).await?;
        let size = u32::from_be_bytes([frame[3], frame[4], frame[5], frame[6]]);
        let rest = usize::try_from(size).expect("a size") + 1;
        frame.resize(7 + rest, 0);
        client.read_exact(&mut frame[7..]).await?;
        let is_acknowledgement = frame[0] == 1 && frame[7..].starts_with(&ACKNOWLEDGEMENT);
        if !(is_acknowledgement && loses.load(Ordering::SeqCst)) {
            server.write_all(&frame).await?;
        }
    }
}

/// From the broker to the service, as it is.
async fn hear(mut server: OwnedReadHalf, mut client: OwnedWriteHalf) -> std::io::Result<()> {
    tokio::io::copy(&mut server, &mut client).await?;
    Ok(())
}
