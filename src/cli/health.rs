//! `stock-service health`: asks the running worker whether it is ready.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, anyhow, bail};

use super::{PATIENCE, say};
use crate::http;
use crate::settings::Settings;

/// Ask the running `consume` whether it is ready, for a container's health check
///
/// Prints what it answers. Exit status 0 when it is ready (or, with --live, alive), 1 when it is not or does not answer.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example:\n  stock-service health || echo 'not consuming'\n\nIt asks at http.listen, from the same \
    settings as `consume`."
)]
pub(super) struct Args {
    /// Ask whether it can still do its work by itself (/livez), whatever its servers do
    #[arg(long)]
    live: bool,
}

pub(super) async fn run(args: Args, settings: &Settings) -> anyhow::Result<()> {
    let listen = settings.http_listen.context("http.listen is off: there is nobody to ask")?;
    let path = if args.live { "/livez" } else { "/readyz" };
    let address = reachable(listen);
    let url = format!("http://{address}{path}");
    let answer = tokio::time::timeout(PATIENCE, http::get(address, path)).await;
    let (status, body) = answer
        .unwrap_or_else(|_| Err(anyhow!("no answer within {PATIENCE:?}")))
        .with_context(|| format!("cannot ask {url} (http.listen)"))?;
    say(body.trim_end())?;
    if !status.is_success() {
        bail!("{url} says {status}");
    }
    Ok(())
}

/// Where to ask who listens there: "any address" is none that can be asked.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    (ip, listen.port()).into()
}
