//! The network between one replica and one server: a TCP proxy that can be frozen and cut.

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;
use url::Url;

use crate::servers::Server;

/// How a network is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Sound,
    /// Nothing arrives, and nobody is told.
    Frozen,
    /// All connections end at once, old and new ones.
    Cut,
}

/// The networks of one replica.
#[derive(Debug)]
pub struct Networks {
    broker: Network,
    database: Network,
}

impl Networks {
    /// Sound networks before both servers.
    pub async fn before(broker: &Url, database: &Url) -> anyhow::Result<Self> {
        Ok(Self { broker: Network::before(broker).await?, database: Network::before(database).await? })
    }

    pub fn to(&self, server: Server) -> &Network {
        match server {
            Server::Broker => &self.broker,
            Server::Database => &self.database,
        }
    }
}

/// Forwards connections to one server, until it is dropped.
#[derive(Debug)]
pub struct Network {
    url: Url,
    state: watch::Sender<State>,
    _accepting: AbortOnDropHandle<()>,
}

impl Network {
    /// A sound network before the server at this URL.
    async fn before(server: &Url) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let mut url = server.clone();
        url.set_port(Some(listener.local_addr()?.port())).ok().context("a URL with a host")?;
        let address = (server.host_str().context("a host")?.to_owned(), server.port().context("a port")?);
        let state = watch::Sender::new(State::Sound);
        let states = state.subscribe();
        let accepting = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(forward(client, address.clone(), states.clone()));
            }
        });
        Ok(Self { url, state, _accepting: AbortOnDropHandle::new(accepting) })
    }

    /// The server's URL by way of this network.
    pub fn url(&self) -> &Url {
        &self.url
    }

    pub fn set(&self, state: State) {
        self.state.send_replace(state);
    }
}

async fn forward(client: TcpStream, server: (String, u16), mut states: watch::Receiver<State>) -> anyhow::Result<()> {
    states.wait_for(|state| *state != State::Frozen).await?;
    let server = TcpStream::connect(server).await?;
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::select! {
        ended = carry(from_client, to_server, states.clone()) => ended,
        ended = carry(from_server, to_client, states.clone()) => ended,
        cut = states.wait_for(|state| *state == State::Cut) => Ok(cut.map(drop)?),
    }
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut states: watch::Receiver<State>,
) -> anyhow::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let bytes = from.read(&mut buffer).await?;
        // The end of a connection does not arrive either.
        states.wait_for(|state| *state != State::Frozen).await?;
        if bytes == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..bytes]).await?;
    }
}
