//! Where the broker is.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use percent_encoding::percent_decode_str;

use super::ANSWER_TIMEOUT;
use crate::tls::{Files, Names, is_remote};

/// The parameters have the names that RabbitMQ's own clients read.
pub(super) const TLS: Names = Names {
    url: "AMQP_URL (amqp.url)",
    authorities: "cacertfile",
    certificate: "certfile",
    key: "keyfile",
    without: "use the port of its TLS listener (5671) in AMQP_URL (amqp.url), or amqp:// in a network that you trust",
};

/// The largest frame in bytes, unless the broker allows less: what RabbitMQ allows by default. lapin makes two buffers of
/// 32 frames for a connection; with a broker that has no limit (0) these would be 137 GB each.
const FRAME_MAX: u32 = 131_072;

/// Where the broker is: a URL whose password never shows.
#[derive(Clone)]
pub struct AmqpUrl {
    pub(super) uri: AMQPUri,
    url: url::Url,
    pub(super) connect_timeout: Duration,
    /// What TLS takes; none for a URL without it.
    pub(super) tls: Option<Files>,
}

impl AmqpUrl {
    /// Host and port, to connect to.
    pub(super) fn address(&self) -> (String, u16) {
        (self.uri.authority.host.clone(), self.uri.authority.port)
    }

    /// Whether it speaks TLS; the broker is verified then.
    pub fn is_secure(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether the way there leaves this machine.
    pub fn is_remote(&self) -> bool {
        is_remote(&self.uri.authority.host)
    }

    /// Host and port, for errors and logs.
    pub fn place(&self) -> String {
        format!("{}:{}", self.uri.authority.host, self.uri.authority.port)
    }
}

impl FromStr for AmqpUrl {
    type Err = &'static str; // never quotes what it read: a part of it may be the password

    /// Reads a URL by its own rules, not by lapin's, which takes another host, user or vhost than was given for a few.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const RULE: &str = "must be a URL such as amqp://user:password@host:5672/%2f, with special characters of user, \
                            password and vhost percent-encoded";
        const VHOST: &str = "its path must be one vhost, with / written %2f";

        // The URL parser drops blanks and line ends where they are least expected.
        if text.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(RULE);
        }
        let url = url::Url::parse(text).map_err(|_| RULE)?;
        let (scheme, port) = match url.scheme() {
            "amqp" => (AMQPScheme::AMQP, 5672),
            "amqps" => (AMQPScheme::AMQPS, 5671),
            _ => return Err(RULE),
        };
        let decode = |part: &str| percent_decode_str(part).decode_utf8().map(String::from).map_err(|_| RULE);
        let host = match url.host().ok_or(RULE)? {
            url::Host::Domain(name) if !name.is_empty() => decode(name)?,
            url::Host::Domain(_) => return Err(RULE),
            url::Host::Ipv4(address) => address.to_string(),
            url::Host::Ipv6(address) => address.to_string(),
        };
        let (username, password) = match (url.username(), url.password()) {
            ("", None) => ("guest".to_owned(), "guest".to_owned()), // the broker's own default, for this machine only
            ("", Some(_)) | (_, None) => return Err("needs both a user and a password, or neither for guest"),
            (user, Some(password)) => (decode(user)?, decode(password)?),
        };
        let vhost = match url.path() {
            "" => "/".to_owned(),
            path => match path.trim_start_matches('/') {
                "" => return Err(VHOST),
                rest if rest.contains('/') || path.starts_with("//") => return Err(VHOST),
                rest => decode(rest)?,
            },
        };
        if url.fragment().is_some() {
            return Err(RULE);
        }
        let mut heartbeat = 10; // seconds; a dead peer is noticed within two
        let mut connect_timeout = ANSWER_TIMEOUT;
        let (mut authorities, mut certificate, mut key_file) = (None, None, None);
        for (key, value) in url.query_pairs() {
            match &*key {
                "heartbeat" => {
                    heartbeat =
                        value.parse().ok().filter(|s| (1..=600).contains(s)).ok_or("heartbeat must be 1 to 600 s")?;
                }
                "connection_timeout" => {
                    let milliseconds = value.parse().ok().filter(|ms| (100..=30_000).contains(ms));
                    connect_timeout =
                        Duration::from_millis(milliseconds.ok_or("connection_timeout must be 100 to 30000 ms")?);
                }
                "cacertfile" => authorities = Some(value.into_owned()),
                "certfile" => certificate = Some(value.into_owned()),
                "keyfile" => key_file = Some(value.into_owned()),
                // Said by those who copy a URL of another client's; it is always so here.
                "verify" if value == "verify_peer" => {}
                "verify" => {
                    return Err("verify may only be verify_peer: the broker's certificate is always verified; name a \
                                private CA's with cacertfile");
                }
                _ => {
                    return Err("its parameters may be heartbeat, connection_timeout, and with amqps cacertfile, \
                                certfile and keyfile");
                }
            }
        }
        let identity = match (certificate, key_file) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => return Err("certfile and keyfile belong together"),
        };
        let tls = match scheme {
            AMQPScheme::AMQPS => Some(Files { names: &TLS, authorities, identity }),
            AMQPScheme::AMQP if authorities.is_some() || identity.is_some() => {
                return Err("cacertfile, certfile and keyfile are for amqps");
            }
            AMQPScheme::AMQP => None,
        };
        let uri = AMQPUri {
            scheme,
            authority: AMQPAuthority {
                userinfo: AMQPUserInfo { username, password },
                host,
                port: url.port().unwrap_or(port),
            },
            vhost,
            query: AMQPQueryString {
                heartbeat: Some(heartbeat),
                frame_max: Some(FRAME_MAX),
                ..AMQPQueryString::default()
            },
        };
        Ok(Self { uri, url, connect_timeout, tls })
    }
}

impl fmt::Display for AmqpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::settings::mask(&self.url, f)
    }
}

impl fmt::Debug for AmqpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_means_what_it_says() {
        for (text, host, port, vhost, user, password) in [
            ("amqp://localhost", "localhost", 5672, "/", "guest", "guest"),
            ("amqps://u:p@broker/%2F", "broker", 5671, "/", "u", "p"),
            ("amqp://u:p%40ss%3Aw%2Frd%23%25%3F%C3%A9@[::1]:5673/a%2fb", "::1", 5673, "a/b", "u", "p@ss:w/rd#%?é"),
        ] {
            let url: AmqpUrl = text.parse().unwrap();
            let AMQPAuthority { userinfo, host: h, port: p } = &url.uri.authority;
            assert_eq!((h.as_str(), *p, url.uri.vhost.as_str()), (host, port, vhost), "{text}");
            assert_eq!((userinfo.username.as_str(), userinfo.password.as_str()), (user, password), "{text}");
        }
    }

    #[test]
    fn what_could_be_misread_is_refused_without_a_quote() {
        for text in [
            "",
            "localhost:5672",
            "http://h/",
            "amqp://",
            "amqp://h/",
            "amqp://h//",
            "amqp://h/a/b",
            "amqp://u@h",
            "amqp://:p@h",
            "amqp://u:p@h\n",
            "amqp://u:S3CR3T@ss:w/rd#%?é@h",
            "amqp://u:S3CR3T#x@h",
            "amqp://u:p@h?heartbeat=0",
            "amqps://u:p@h?verify=verify_none",
            "amqps://u:p@h?certfile=/c.pem",
            "amqps://u:p@h?keyfile=/k.pem",
            "amqp://u:p@h?cacertfile=/ca.pem",
            "amqps://u:p@h?fail_if_no_peer_cert=false",
        ] {
            let error = text.parse::<AmqpUrl>().unwrap_err();
            assert!(!error.contains("S3CR3T"), "{text}: {error}");
        }
    }

    #[test]
    fn frames_have_a_limit_whatever_the_broker_allows() {
        let url: AmqpUrl = "amqp://user:password@broker".parse().unwrap();
        assert_eq!(url.uri.query.frame_max, Some(131_072));
    }

    #[test]
    fn a_url_never_shows_its_password() {
        let url: AmqpUrl = "amqp://user:S3CR3T@broker:5673/%2f?heartbeat=5".parse().unwrap();
        assert_eq!(url.to_string(), "amqp://user:***@broker:5673/%2f?heartbeat=5");
        assert!(!format!("{url:?}").contains("S3CR3T"));
    }
}
