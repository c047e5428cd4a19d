//! A TCP proxy before a server: it cuts connections, turns them away, falls silent, is slow, and loses frames of AMQP.
//!
//! What TCP itself never does it does not do either: bytes that it keeps back arrive later, or with their connection
//! never.

use std::collections::HashSet;
use std::io::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use Way::{ToClient, ToServer};

/// Class and method of what is looked for, at the beginning of a method frame's payload.
const PUBLISH: [u8; 4] = [0, 60, 0, 40];
const DELIVER: [u8; 4] = [0, 60, 0, 60];
/// Both sides say it: the service to settle a delivery, the broker to confirm a publish.
const ACK: [u8; 4] = [0, 60, 0, 80];

/// A direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    ToServer,
    ToClient,
}

/// Forwards all connections to the server until it is dropped.
#[derive(Debug)]
pub struct Proxy {
    url: String,
    faults: watch::Sender<Faults>,
    accepted: Arc<AtomicUsize>,
    _accepting: AbortOnDropHandle<()>,
}

/// What goes wrong on the way.
#[derive(Clone, Debug, Default)]
struct Faults {
    /// A connection ends when this grows,
    cuts: u32,
    /// and one direction of it when this does.
    half_closes: Ways<u32>,
    turns_away: bool,
    silent: Ways<bool>,
    delay: Ways<Duration>,
    loses_acknowledgements: bool,
    loses_confirms: bool,
    loses_deliveries: bool,
    falls_silent_at_a_publish: bool,
    cuts_at: Option<&'static str>,
}

/// One for each direction.
#[derive(Clone, Debug, Default)]
struct Ways<T> {
    to_server: T,
    to_client: T,
}

impl<T> Ways<T> {
    fn at(&self, way: Way) -> &T {
        match way {
            ToServer => &self.to_server,
            ToClient => &self.to_client,
        }
    }

    fn at_mut(&mut self, way: Way) -> &mut T {
        match way {
            ToServer => &mut self.to_server,
            ToClient => &mut self.to_client,
        }
    }
}

impl Proxy {
    /// A proxy before the server at this URL. Frames are known by the scheme `amqp`; all else is bytes.
    pub async fn before(server: &str) -> Self {
        let mut url = url::Url::parse(server).expect("a URL");
        let default_port = if url.scheme().starts_with("postgres") { 5432 } else { 5672 };
        let has_frames = url.scheme() == "amqp";
        let server = format!("{}:{}", url.host_str().expect("a host"), url.port().unwrap_or(default_port));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        url.set_host(Some("127.0.0.1")).expect("a host");
        url.set_port(Some(listener.local_addr().expect("an address").port())).expect("a port");
        let faults = watch::Sender::new(Faults::default());
        let accepted = Arc::<AtomicUsize>::default();
        let (shared, counter) = (faults.clone(), accepted.clone());
        let accepting = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::SeqCst);
                if !shared.borrow().turns_away {
                    connections.spawn(forward(client, server.clone(), has_frames, shared.clone()));
                }
            }
        });
        Self { url: url.into(), faults, accepted, _accepting: AbortOnDropHandle::new(accepting) }
    }

    /// The server's URL by way of this proxy.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// How many connections have come.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Cuts all connections there are; new ones are as good as ever.
    pub fn cut(&self) {
        self.faults.send_modify(|faults| faults.cuts += 1);
    }

    /// Cuts all connections there are, and turns new ones away, until told otherwise.
    pub fn turn_away(&self, turns_away: bool) {
        self.faults.send_modify(|faults| {
            faults.turns_away = turns_away;
            faults.cuts += u32::from(turns_away);
        });
    }

    /// Forwards nothing this way, and closes nothing; new connections are taken, and get no answer.
    pub fn silence(&self, way: Way) {
        self.faults.send_modify(|faults| *faults.silent.at_mut(way) = true);
    }

    /// Forwards nothing at all, and closes nothing.
    pub fn black_hole(&self) {
        self.faults.send_modify(|faults| faults.silent = Ways { to_server: true, to_client: true });
    }

    /// Ends all silence: what was kept back goes on.
    pub fn speak(&self) {
        self.faults.send_modify(|faults| {
            faults.silent = Ways::default();
            faults.falls_silent_at_a_publish = false;
        });
    }

    /// Keeps everything back this way for so long.
    pub fn delay(&self, way: Way, delay: Duration) {
        self.faults.send_modify(|faults| *faults.delay.at_mut(way) = delay);
    }

    /// Ends the stream this way, of the connections that there are; the other way goes on.
    pub fn half_close(&self, way: Way) {
        self.faults.send_modify(|faults| *faults.half_closes.at_mut(way) += 1);
    }

    /// From now on no acknowledgement of the service's arrives at the broker.
    pub fn lose_acknowledgements(&self) {
        self.faults.send_modify(|faults| faults.loses_acknowledgements = true);
    }

    /// From now on no confirm of the broker's arrives at the service.
    pub fn lose_confirms(&self) {
        self.faults.send_modify(|faults| faults.loses_confirms = true);
    }

    /// Whether deliveries of the broker's are lost on their way to the service; all else passes, heartbeats too.
    pub fn lose_deliveries(&self, loses: bool) {
        self.faults.send_modify(|faults| faults.loses_deliveries = loses);
    }

    /// Falls silent in both directions with the next publish, which does not arrive.
    pub fn fall_silent_at_a_publish(&self) {
        self.faults.send_modify(|faults| faults.falls_silent_at_a_publish = true);
    }

    /// Cuts all connections whenever a body with this text is on its way to the service.
    pub fn cut_at(&self, text: &'static str) {
        self.faults.send_modify(|faults| faults.cuts_at = Some(text));
    }

    /// How often connections were cut.
    pub fn cuts(&self) -> u32 {
        self.faults.borrow().cuts
    }

    /// Whether nothing is forwarded to the server.
    pub fn is_silent(&self) -> bool {
        self.faults.borrow().silent.to_server
    }
}

/// One connection's life.
async fn forward(client: TcpStream, server: String, has_frames: bool, faults: watch::Sender<Faults>) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let mut cut = faults.subscribe();
    let cuts = cut.borrow().cuts;
    let say = Pump { from: from_client, to: to_server, way: ToServer, has_frames, faults: faults.clone() };
    let hear = Pump { from: from_server, to: to_client, way: ToClient, has_frames, faults };
    tokio::select! {
        _ = say.run() => {}
        _ = hear.run() => {}
        _ = cut.wait_for(|faults| faults.cuts > cuts) => {}
    }
}

/// One direction of one connection.
struct Pump {
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    way: Way,
    has_frames: bool,
    faults: watch::Sender<Faults>,
}

impl Pump {
    async fn run(mut self) -> Result<()> {
        let (way, mut seen) = (self.way, self.faults.subscribe());
        let half_closes = *seen.borrow().half_closes.at(way);
        let pumping = async {
            if self.has_frames && way == ToServer {
                let mut greeting = [0; 8];
                self.from.read_exact(&mut greeting).await?;
                self.pass(&greeting).await?;
            }
            // The channels on which a delivery is being lost, whose header and body are frames of their own.
            let mut losing = HashSet::new();
            loop {
                let piece = self.next().await?;
                if !(self.has_frames && self.is_lost(&piece, &mut losing)) {
                    self.pass(&piece).await?;
                }
            }
        };
        tokio::select! {
            end = pumping => return end,
            _ = seen.wait_for(|faults| *faults.half_closes.at(way) > half_closes) => {}
        }
        self.to.shutdown().await?;
        std::future::pending().await
    }

    /// The next frame; or the next bytes, of what has none.
    async fn next(&mut self) -> Result<Vec<u8>> {
        if !self.has_frames {
            let mut bytes = vec![0; 65_536];
            let read = self.from.read(&mut bytes).await?;
            bytes.truncate(read);
            return if read == 0 { Err(std::io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) };
        }
        // Type, channel, size; the payload; an end mark.
        let mut frame = vec![0; 7];
        self.from.read_exact(&mut frame).await?;
        let size = u32::from_be_bytes([frame[3], frame[4], frame[5], frame[6]]);
        frame.resize(7 + usize::try_from(size).expect("a size") + 1, 0);
        self.from.read_exact(&mut frame[7..]).await?;
        Ok(frame)
    }

    /// Forwards, when it may.
    async fn pass(&mut self, bytes: &[u8]) -> Result<()> {
        let delay = *self.faults.borrow().delay.at(self.way);
        tokio::time::sleep(delay).await;
        let (way, mut seen) = (self.way, self.faults.subscribe());
        seen.wait_for(|faults| !faults.silent.at(way)).await.expect("we hold a sender");
        self.to.write_all(bytes).await
    }

    fn is_lost(&self, frame: &[u8], losing: &mut HashSet<[u8; 2]>) -> bool {
        let channel = [frame[1], frame[2]];
        let faults = self.faults.borrow().clone();
        if frame[0] != 1 {
            let has = |text: &str| frame.windows(text.len()).any(|part| part == text.as_bytes());
            let cuts = self.way == ToClient && faults.cuts_at.is_some_and(has);
            if cuts {
                self.faults.send_modify(|faults| faults.cuts += 1);
            }
            return cuts || losing.contains(&channel);
        }
        losing.remove(&channel);
        match (self.way, &frame[7..11]) {
            (ToServer, method) if method == ACK => faults.loses_acknowledgements,
            (ToServer, method) if method == PUBLISH => {
                if faults.falls_silent_at_a_publish {
                    self.faults.send_modify(|faults| faults.silent = Ways { to_server: true, to_client: true });
                }
                false
            }
            (ToClient, method) if method == ACK => faults.loses_confirms,
            (ToClient, method) if method == DELIVER && faults.loses_deliveries => losing.insert(channel),
            _ => false,
        }
    }
}
