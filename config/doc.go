// Package config turns flags, environment and a file into one validated, plain
// Config. It knows no other package of the product.
//
// Callers first give a command its flags, then parse the command line, then load:
//
//	config.AddFlags(cmd.Flags(), config.Postgres, config.Slot)
//	…
//	cfg, err := config.Load(cmd.Flags(), os.Environ())
//
// Flags win over WALRELAY_… variables (and those of libpq and NATS), these over
// the YAML file, the file over defaults. All of it is derived from one table,
// options, and every mistake is reported at once as an *Error.
//
// Values that hold credentials are Secrets: they print redacted.
package config
