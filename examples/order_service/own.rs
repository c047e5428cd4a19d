//! A database of the demo's own on somebody's server, so that nothing there is touched.

use anyhow::{Context as _, Result, bail, ensure};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use url::Url;

/// Creates the database and returns its URL.
pub(crate) async fn create_database(url: &str, name: &str) -> Result<String> {
    let name = checked(name)?;
    let mut own = match Url::parse(url) {
        Ok(url) => url,
        // Not the text itself: there may be a password in it.
        Err(error) => bail!("DATABASE_URL is not a URL: {error}"),
    };
    own.set_path(name);
    execute(url, format!(r#"create database "{name}""#)).await.with_context(|| {
        format!("cannot create the database {name}: the demo needs one of its own, and the right to create it")
    })?;
    Ok(own.to_string())
}

pub(crate) async fn drop_database(url: &str, name: &str) -> Result<()> {
    let name = checked(name)?;
    execute(url, format!(r#"drop database if exists "{name}" with (force)"#))
        .await
        .with_context(|| format!("cannot drop the database {name}"))
}

async fn execute(url: &str, statement: String) -> Result<()> {
    let mut connection = PgConnection::connect(url).await.context("cannot connect to PostgreSQL")?;
    // A name can't be a parameter; `checked` has seen it.
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

/// Only names that can't be anything else than the demo's.
fn checked(name: &str) -> Result<&str> {
    let plain = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    ensure!(plain && name.starts_with("stock_demo_") && name.len() <= 63, "{name} is not a name of a demo's database");
    Ok(name)
}
