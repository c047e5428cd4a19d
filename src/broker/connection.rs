//! Connections to the broker: made within a limit or given up without a trace, and closed with a goodbye.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use lapin::tcp::{AsyncTcpStream, TLSConfig};
use lapin::{Connection, ConnectionProperties};

use super::{AmqpUrl, BrokerError, answer, within};

/// Connects; `purpose` tells the connections of one process apart in the broker's own lists.
///
/// Nothing recovers by itself: whoever owns the connection builds all that hangs on it again.
///
/// # Errors
/// The broker's or the network's; never with the password in it.
pub async fn connect(url: &AmqpUrl, purpose: &str) -> Result<Connection, BrokerError> {
    let name = format!("stock-service {purpose}");
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    let (host, port) = (url.uri.authority.host.clone(), url.uri.authority.port);
    let (is_secure, limit) = (url.is_secure(), url.connect_timeout);
    let line = Arc::new(Line::default());
    let shared = line.clone();
    let dialled = Connection::connector(
        url.uri.clone(),
        lapin::runtime::default_runtime()?,
        async move |_, runtime| {
            let dial = async {
                let addresses = runtime.to_socket_addrs((host.clone(), port));
                let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
                if let AsyncTcpStream::Plain(plain) = &stream {
                    shared.dialled(plain.get_ref())?;
                }
                match is_secure {
                    true => stream.into_tls(&host, TLSConfig::default()).await,
                    false => Ok(stream),
                }
            };
            // Not left to the caller's patience: this runs on a thread of its own, which would go on dialling.
            let dialled = tokio::time::timeout(limit, dial).await;
            Ok(dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?)
        },
        properties,
    );
    let connection = within(limit, dialled).await;
    if let Some(socket) = line.end()
        && connection.is_err()
    {
        socket.shutdown(Shutdown::Both).ok(); // it may be shut down already
    }
    connection
}

/// Closes with the protocol's handshake, so that what was written before has arrived.
pub async fn close(connection: &Connection) {
    // A connection that is gone already has nothing to close.
    answer(connection.close(200, "stopped".into())).await.ok();
}

/// A hold on the socket of a connection that is being made.
///
/// lapin cannot be told to give up: its thread waits for a peer that accepts and says nothing, and keeps the socket. So
/// the socket is shut down under it.
#[derive(Debug, Default)]
struct Line(Mutex<Dialling>);

#[derive(Debug, Default)]
enum Dialling {
    #[default]
    Begun,
    Connected(TcpStream),
    Over,
}

impl Line {
    /// Notes the socket.
    ///
    /// # Errors
    /// Nobody waits for it any more.
    fn dialled(&self, socket: &impl AsFd) -> io::Result<()> {
        let mut dialling = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*dialling, Dialling::Over) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        *dialling = Dialling::Connected(socket.as_fd().try_clone_to_owned()?.into());
        Ok(())
    }

    /// Ends the dialling; gives the socket if there is one by now.
    fn end(&self) -> Option<TcpStream> {
        let mut dialling = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *dialling, Dialling::Over) {
            Dialling::Connected(socket) => Some(socket),
            Dialling::Begun | Dialling::Over => None,
        }
    }
}
