//! What only the broker's management page can tell: how much is in the consumers' hands.

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use http_body_util::{BodyExt as _, Empty};
use hyper::{Request, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use tokio::net::TcpStream;
use url::Url;

/// The page of the broker that an AMQP URL names, for the same user.
pub(crate) struct Management {
    address: String,
    authorization: String,
    /// As it stands in a URL.
    vhost: String,
}

impl Management {
    pub(crate) fn new(amqp_url: &str, port: u16) -> Result<Self> {
        let url = Url::parse(amqp_url).context("AMQP_URL is not a URL")?;
        let host = url.host_str().context("AMQP_URL names no host")?;
        let decoded = |part| percent_decode_str(part).decode_utf8_lossy();
        let credentials = format!("{}:{}", decoded(url.username()), decoded(url.password().unwrap_or_default()));
        let vhost = url.path().trim_start_matches('/');
        Ok(Self {
            address: format!("{host}:{port}"),
            authorization: format!("Basic {}", BASE64_STANDARD.encode(credentials)),
            vhost: if vhost.is_empty() { "%2f" } else { vhost }.to_owned(),
        })
    }

    /// Messages of the queue that were delivered and not settled, as they were at most 5 s ago.
    pub(crate) async fn unsettled(&self, queue: &str) -> Result<u32> {
        let path = format!("/api/queues/{}/{queue}?disable_stats=true&enable_queue_totals=true", self.vhost);
        let answer = self.get(&path).await.with_context(|| format!("cannot ask http://{}{path}", self.address))?;
        let count = answer["messages_unacknowledged"].as_u64().context("the broker's management counts nothing")?;
        Ok(u32::try_from(count)?)
    }

    async fn get(&self, path: &str) -> Result<serde_json::Value> {
        let stream = TcpStream::connect(&self.address).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::get(path)
            .header(header::HOST, &self.address)
            .header(header::AUTHORIZATION, &self.authorization)
            .body(Empty::<Bytes>::new())?;
        // Takes the sender along: the connection, which moves the bytes, lasts as long as that.
        let ask = async move {
            let response = sender.send_request(request).await?;
            ensure!(response.status().is_success(), "it says {}", response.status());
            let body = response.into_body().collect().await?.to_bytes();
            anyhow::Ok(serde_json::from_slice(&body)?)
        };
        let (answer, _) = tokio::join!(ask, connection);
        answer
    }
}
