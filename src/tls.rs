//! TLS, as far as both servers share it: certificates and keys out of files, and why a connection by TLS did not come
//! about.
//!
//! The broker is always verified; nothing can switch that off. With PostgreSQL the URL's `sslmode` decides, as everywhere.

use std::error::Error;
use std::net::IpAddr;
use std::{fs, io};

use chrono::{DateTime, SecondsFormat};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::{AlertDescription, CertificateError, RootCertStore};

use crate::stock::harmless;

/// What a server's settings are called, for whoever has to mend them.
#[derive(Debug)]
pub(crate) struct Names {
    /// The variable and the key of the URL.
    pub(crate) url: &'static str,
    /// Its parameter for the certificates of those who may issue the server's.
    pub(crate) authorities: &'static str,
    /// Its parameter for the certificate of our own.
    pub(crate) certificate: &'static str,
    /// Its parameter for that one's key.
    pub(crate) key: &'static str,
    /// What to do about a server that speaks no TLS.
    pub(crate) without: &'static str,
}

/// The files that a URL names. They are read anew for each connection, so that renewed ones need no restart.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) names: &'static Names,
    /// The certificates of those who may issue the server's.
    pub(crate) authorities: Option<String>,
    /// The certificate of our own, and its key.
    pub(crate) identity: Option<(String, String)>,
}

/// What is in the files.
#[derive(Debug)]
pub(crate) struct Certificates {
    pub(crate) authorities: Option<Vec<CertificateDer<'static>>>,
    pub(crate) identity: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
}

/// Why a connection by TLS did not come about, and the way out.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{cause}; {remedy}")]
pub struct TlsFault {
    /// What is wrong.
    pub cause: String,
    /// What to do about it.
    pub remedy: String,
}

impl Files {
    /// Reads them all.
    ///
    /// # Errors
    /// The first file that is not what it should be.
    pub(crate) fn read(&self) -> Result<Certificates, TlsFault> {
        let names = self.names;
        let authorities = self.authorities.as_ref().map(|path| {
            let certificates = self.certificates(names.authorities, path)?;
            let is_sound = |certificate: &CertificateDer<'_>| RootCertStore::empty().add(certificate.clone()).is_ok();
            match certificates.iter().all(is_sound) {
                true => Ok(certificates),
                false => Err(self.unfit(names.authorities, path, "holds a certificate that cannot be read")),
            }
        });
        let identity = self.identity.as_ref().map(|(certificate, key)| {
            let chain = self.certificates(names.certificate, certificate)?;
            let unfit = |_| self.unfit(names.key, key, "holds no private key in PEM form, or an encrypted one");
            Ok((chain, PrivateKeyDer::from_pem_slice(&self.content(names.key, key)?).map_err(unfit)?))
        });
        Ok(Certificates { authorities: authorities.transpose()?, identity: identity.transpose()? })
    }

    fn certificates(&self, parameter: &str, path: &str) -> Result<Vec<CertificateDer<'static>>, TlsFault> {
        let content = self.content(parameter, path)?;
        match CertificateDer::pem_slice_iter(&content).collect::<Result<Vec<_>, _>>() {
            Ok(certificates) if !certificates.is_empty() => Ok(certificates),
            _ => Err(self.unfit(parameter, path, "holds no certificate in PEM form")),
        }
    }

    fn content(&self, parameter: &str, path: &str) -> Result<Vec<u8>, TlsFault> {
        fs::read(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => self.unfit(parameter, path, "does not exist"),
            io::ErrorKind::IsADirectory => self.unfit(parameter, path, "is a folder"),
            kind => self.unfit(parameter, path, &format!("cannot be read: {kind}")),
        })
    }

    fn unfit(&self, parameter: &str, path: &str, what: &str) -> TlsFault {
        TlsFault {
            cause: format!("the file {} {what}", harmless(path)),
            remedy: format!("correct {parameter} in {}, or the file", self.names.url),
        }
    }
}

impl TlsFault {
    /// The fault of TLS behind an error, if it was one.
    pub(crate) fn find(error: &(dyn Error + 'static), names: &Names) -> Option<Self> {
        if let Some(fault) = error.downcast_ref::<Self>() {
            return Some(fault.clone());
        }
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return Some(Self::explain(error, names));
        }
        // What an I/O error was made of is not among its sources.
        Self::find(error.downcast_ref::<io::Error>()?.get_ref()?, names)
    }

    /// A server that does not even begin with TLS.
    pub(crate) fn speaks_none(cause: impl Into<String>, names: &Names) -> Self {
        Self { cause: cause.into(), remedy: names.without.to_owned() }
    }

    /// A connection that ended between the handshake and the server's first word. With TLS 1.3 the server judges the
    /// client's certificate only then, and its reason may be lost with the connection.
    pub(crate) fn cut_off(names: &Names) -> Self {
        let Names { url, certificate, key, .. } = names;
        Self {
            cause: "the server closed the connection right after the TLS handshake".to_owned(),
            remedy: format!(
                "if it wants a client certificate, name one that it accepts, and its key: {certificate} and {key} in \
                 {url}; else look at its log"
            ),
        }
    }

    fn explain(error: &rustls::Error, names: &Names) -> Self {
        use AlertDescription as Alert;
        use CertificateError as Certificate;
        use rustls::Error as Tls;

        let Names { url, authorities, certificate, key, .. } = names;
        let (cause, remedy) = match error {
            // The second one: by somebody of the same name as one who is trusted, with another key.
            Tls::InvalidCertificate(Certificate::UnknownIssuer | Certificate::BadSignature) => (
                "the server's certificate is issued by nobody who is trusted here".to_owned(),
                format!("name the file with its CA's certificate: {authorities} in {url}"),
            ),
            Tls::InvalidCertificate(Certificate::NotValidForNameContext { expected, presented }) => (
                match &presented[..] {
                    // The common name has not counted for many years.
                    [] => "the server's certificate has no host name (subjectAltName)".to_owned(),
                    names => format!(
                        "the server's certificate is not for {}, but for {}",
                        expected.to_str(),
                        names.iter().map(|name| host(name)).collect::<Vec<_>>().join(", ")
                    ),
                },
                format!("use a name of the certificate's as the host in {url}, or have it issued for this host"),
            ),
            Tls::InvalidCertificate(Certificate::ExpiredContext { not_after, .. }) => (
                format!("the server's certificate expired at {}", time(*not_after)),
                "renew it, or set this machine's clock".to_owned(),
            ),
            Tls::InvalidCertificate(Certificate::NotValidYetContext { not_before, .. }) => (
                format!("the server's certificate is not valid before {}", time(*not_before)),
                "set this machine's clock, or the server's certificate anew".to_owned(),
            ),
            Tls::InvalidCertificate(other) => (
                format!("the server's certificate is refused: {other}"),
                "have it issued anew, for a server (not a CA), with the host's name as subjectAltName".to_owned(),
            ),
            Tls::AlertReceived(Alert::CertificateRequired) => (
                "the server demands a client certificate".to_owned(),
                format!("name one, and its key: {certificate} and {key} in {url}"),
            ),
            Tls::AlertReceived(alert) => {
                (format!("the server ended the TLS handshake ({alert:?})"), Self::cut_off(names).remedy)
            }
            Tls::InconsistentKeys(_) => (
                format!("the key in {key} is not that of the certificate in {certificate}"),
                format!("correct them in {url}; the first certificate in the file is the one"),
            ),
            Tls::InvalidMessage(_) => return Self::speaks_none("what answers there does not speak TLS", names),
            Tls::PeerIncompatible(_) => {
                (format!("the server's TLS does not fit: {error}"), "let it speak TLS 1.2 or 1.3".to_owned())
            }
            other => (format!("no connection by TLS: {other}"), "look at the server's log".to_owned()),
        };
        Self { cause, remedy }
    }
}

/// Whether the way to a host leaves this machine.
pub(crate) fn is_remote(host: &str) -> bool {
    !host.parse::<IpAddr>().map_or(host == "localhost", |address| address.is_loopback())
}

/// The host in a name of a certificate's, as rustls writes it: `DnsName("localhost")`.
fn host(name: &str) -> String {
    harmless(name.split_once('(').map_or(name, |(_, host)| host.trim_matches(['"', ')'])))
}

fn time(time: UnixTime) -> String {
    let seconds = i64::try_from(time.as_secs()).ok();
    let time = seconds.and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.map(|time| time.to_rfc3339_opts(SecondsFormat::Secs, true)).unwrap_or_default()
}
