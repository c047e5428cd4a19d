//! Connections to the broker: made within a limit or given up without a trace, and closed with a goodbye.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::{AsyncRead, AsyncWrite};
use lapin::tcp::{AsyncTcpStream, RustlsConnector, RustlsConnectorConfig};
use lapin::{Connection, ConnectionProperties, ErrorKind};

use super::url::TLS;
use super::{AmqpUrl, BrokerError, answer, within};
use crate::tls::{Certificates, Files, TlsFault};

/// Connects; `purpose` tells the connections of one process apart in the broker's own lists.
///
/// Nothing recovers by itself: whoever owns the connection builds all that hangs on it again.
///
/// # Errors
/// The broker's or the network's; never with the password in it.
pub async fn connect(url: &AmqpUrl, purpose: &str) -> Result<Connection, BrokerError> {
    let name = format!("stock-service {purpose}");
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    let (url, limit, is_secure) = (url.clone(), url.connect_timeout, url.is_secure());
    let line = Arc::new(Line::default());
    let shared = line.clone();
    let dialled = Connection::connector(
        url.uri.clone(),
        lapin::runtime::default_runtime()?,
        async move |_, runtime| {
            let dial = async {
                let addresses = runtime.to_socket_addrs(url.address());
                let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
                if let AsyncTcpStream::Plain(plain) = &stream {
                    shared.dialled(plain.get_ref())?;
                }
                secure(stream, &url).await
            };
            // Not left to the caller's patience: this runs on a thread of its own, which would go on dialling.
            let dialled = tokio::time::timeout(limit, dial).await;
            Ok(dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?)
        },
        properties,
    );
    // Boxed, for a stream with TLS is large.
    let connection = within(limit, Box::pin(dialled)).await;
    if let Some(socket) = line.end()
        && connection.is_err()
    {
        socket.shutdown(Shutdown::Both).ok(); // it may be shut down already
    }
    match connection.map_err(|error| unless_cut_off(error, is_secure)) {
        // Nothing has been said yet but the protocol's name.
        Err(BrokerError::Lapin(error)) if matches!(error.kind(), ErrorKind::ParsingError(_)) => {
            Err(BrokerError::Stranger)
        }
        connection => connection,
    }
}

/// Speaks TLS from here on, if the URL asks for it.
pub(super) async fn secure<S>(stream: AsyncTcpStream<S>, url: &AmqpUrl) -> io::Result<AsyncTcpStream<S>>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Some(files) = &url.tls else { return Ok(stream) };
    let secured = stream.into_rustls(&connector(files)?, &url.uri.authority.host).await;
    secured.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            let cause = "the connection was closed in the middle of the TLS handshake";
            io::Error::other(TlsFault::speaks_none(cause, files.names))
        }
        _ => error,
    })
}

/// An error before the broker's first word, as a fault of TLS if the connection was just closed.
pub(super) fn unless_cut_off(error: BrokerError, is_secure: bool) -> BrokerError {
    use io::ErrorKind as Kind;

    let is_closed = matches!(&error, BrokerError::Lapin(error) if matches!(error.kind(), ErrorKind::IOError(error) if matches!(
        error.kind(),
        Kind::ConnectionReset | Kind::ConnectionAborted | Kind::BrokenPipe | Kind::UnexpectedEof
    )));
    if is_secure && is_closed { BrokerError::Tls(TlsFault::cut_off(&TLS)) } else { error }
}

/// Trusts the system's authorities, or in their place the URL's.
fn connector(files: &Files) -> io::Result<RustlsConnector> {
    let Certificates { authorities, identity } = files.read().map_err(io::Error::other)?;
    let trusting = match authorities {
        Some(certificates) => RustlsConnectorConfig::default().with_parsable_certificates(certificates),
        None => RustlsConnectorConfig::new_with_native_certs().map_err(|error| {
            let cause = format!("this system has no CA certificates: {error}");
            let remedy = format!("install them, or name a file: {} in {}", files.names.authorities, files.names.url);
            io::Error::other(TlsFault { cause, remedy })
        })?,
    };
    match identity {
        Some((chain, key)) => trusting.connector_with_single_cert(chain, key),
        None => trusting.connector_with_no_client_auth(),
    }
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
