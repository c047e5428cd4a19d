//! A TCP proxy before the broker that can cut connections, fall silent, and lose acknowledgements.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// `basic.ack`: class 60, method 80, at the beginning of a method frame's payload. Both sides say it: the service to
/// settle a delivery, the broker to confirm a publish.
const ACK: [u8; 4] = [0, 60, 0, 80];

/// Forwards all connections to the broker until it is dropped.
#[derive(Debug)]
pub struct Proxy {
    url: String,
    faults: Arc<Faults>,
    /// Counts the cuts; a connection ends with the next one.
    cuts: watch::Sender<u32>,
    _accepting: AbortOnDropHandle<()>,
}

/// What goes wrong on the way.
#[derive(Debug, Default)]
struct Faults {
    loses_acknowledgements: AtomicBool,
    loses_confirms: AtomicBool,
}

impl Proxy {
    /// A proxy before the broker at this URL.
    pub async fn before(broker: &str) -> Self {
        let mut url = url::Url::parse(broker).expect("a URL");
        let broker = format!("{}:{}", url.host_str().expect("a host"), url.port().unwrap_or(5672));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        url.set_host(Some("127.0.0.1")).expect("a host");
        url.set_port(Some(listener.local_addr().expect("an address").port())).expect("a port");
        let faults = Arc::new(Faults::default());
        let cuts = watch::Sender::new(0);
        let (shared, cutter) = (faults.clone(), cuts.clone());
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&broker).await else { continue };
                let (faults, mut cut) = (shared.clone(), cutter.subscribe());
                connections.spawn(async move {
                    let ((from_client, to_client), (from_server, to_server)) =
                        (client.into_split(), server.into_split());
                    tokio::select! {
                        _ = say(from_client, to_server, &faults.loses_acknowledgements) => {}
                        _ = hear(from_server, to_client, &faults.loses_confirms) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { url: url.into(), faults, cuts, _accepting: AbortOnDropHandle::new(accepting) }
    }

    /// The broker's URL by way of this proxy.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// From now on no acknowledgement of the service's arrives at the broker.
    pub fn lose_acknowledgements(&self) {
        self.faults.loses_acknowledgements.store(true, Ordering::SeqCst);
    }

    /// From now on no confirm of the broker's arrives at the service.
    pub fn lose_confirms(&self) {
        self.faults.loses_confirms.store(true, Ordering::SeqCst);
    }

    /// Cuts all connections there are; new ones are as good as ever.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

/// From the service to the broker: a greeting, and frames.
async fn say(
    mut client: impl AsyncRead + Unpin,
    mut server: impl AsyncWrite + Unpin,
    loses: &AtomicBool,
) -> std::io::Result<()> {
    let mut greeting = [0; 8];
    client.read_exact(&mut greeting).await?;
    server.write_all(&greeting).await?;
    hear(client, server, loses).await
}

/// Frame by frame, less the acknowledgements that are to be lost.
async fn hear(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    loses: &AtomicBool,
) -> std::io::Result<()> {
    loop {
        // Type, channel, size; the payload; an end mark.
        let mut frame = vec![0; 7];
        from.read_exact(&mut frame).await?;
        let size = u32::from_be_bytes([frame[3], frame[4], frame[5], frame[6]]);
        let rest = usize::try_from(size).expect("a size") + 1;
        frame.resize(7 + rest, 0);
        from.read_exact(&mut frame[7..]).await?;
        let is_ack = frame[0] == 1 && frame[7..].starts_with(&ACK);
        if !(is_ack && loses.load(Ordering::SeqCst)) {
            to.write_all(&frame).await?;
        }
    }
}
