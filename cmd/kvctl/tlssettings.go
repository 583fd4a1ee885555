package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/epochkv/epochkv/client"
)

// tlsSettings are how to connect. A context has them in its file.
type tlsSettings struct {
	TLS        bool   `json:"tls,omitempty"`      // also on loopback
	PlainText  bool   `json:"insecure,omitempty"` // also off loopback
	CA         string `json:"tls_ca,omitempty"`
	Cert       string `json:"tls_cert,omitempty"`
	Key        string `json:"tls_key,omitempty"`
	ServerName string `json:"tls_server_name,omitempty"`
	TokenFile  string `json:"token_file,omitempty"`
	Token      string `json:"token,omitempty"` // of kvctl login; no flag has it, because others see command lines
}

func (s *tlsSettings) addFlags(flags *pflag.FlagSet) {
	flags.BoolVar(&s.TLS, "tls", false, "use TLS, which is the default unless the endpoint is on loopback ($KVCTL_TLS)")
	flags.StringVar(&s.CA, "tls-ca", "", "PEM `FILE` of the authorities that the server's certificate is checked with (default: $KVCTL_TLS_CA, or those of the system)")
	flags.StringVar(&s.Cert, "tls-cert", "", "PEM `FILE` of the client's certificate ($KVCTL_TLS_CERT)")
	flags.StringVar(&s.Key, "tls-key", "", "PEM `FILE` of its key ($KVCTL_TLS_KEY)")
	flags.StringVar(&s.ServerName, "tls-server-name", "", "`NAME` that the server's certificate must have (default: $KVCTL_TLS_SERVER_NAME, or the host of the endpoint)")
	flags.StringVar(&s.TokenFile, "token-file", "", "`FILE` with the token that says which user the client is (default: $KVCTL_TOKEN_FILE, or the token in $KVCTL_TOKEN)")
	flags.BoolVar(&s.PlainText, "insecure", false, "connect in plain text, also off loopback ($KVCTL_INSECURE)")
}

// setting is one setting in all its places.
type setting struct {
	flag, env string // no flag has an empty name
	text      *string
	yes       *bool
}

func (s *tlsSettings) all() []setting {
	return []setting{
		{flag: "tls", env: "KVCTL_TLS", yes: &s.TLS},
		{flag: "insecure", env: "KVCTL_INSECURE", yes: &s.PlainText},
		{flag: "tls-ca", env: "KVCTL_TLS_CA", text: &s.CA},
		{flag: "tls-cert", env: "KVCTL_TLS_CERT", text: &s.Cert},
		{flag: "tls-key", env: "KVCTL_TLS_KEY", text: &s.Key},
		{flag: "tls-server-name", env: "KVCTL_TLS_SERVER_NAME", text: &s.ServerName},
		{flag: "token-file", env: "KVCTL_TOKEN_FILE", text: &s.TokenFile},
		{env: "KVCTL_TOKEN", text: &s.Token},
	}
}

// adopt takes the settings that no flag has given from the context, or without one from the environment. The settings of a
// context belong together: with some of the environment, a forgotten KVCTL_INSECURE would make its connections plain text.
func (s *tlsSettings) adopt(cmd *cobra.Command, getenv func(string) string, from *serverContext) error {
	others := from.all()
	for i, mine := range s.all() {
		value := ""
		if from.Endpoint == "" {
			value = getenv(mine.env)
		}
		switch {
		case mine.flag != "" && cmd.Flags().Changed(mine.flag):
		case mine.yes != nil && value != "":
			yes, err := strconv.ParseBool(value)
			if err != nil {
				return fmt.Errorf("environment variable %s: %q is not true or false", mine.env, value)
			}
			*mine.yes = yes
		case mine.yes != nil:
			*mine.yes = *others[i].yes
		case value != "":
			*mine.text = value
		default:
			*mine.text = *others[i].text
		}
	}
	return s.check()
}

func (s *tlsSettings) check() error {
	if (s.Cert == "") != (s.Key == "") {
		return errors.New("--tls-cert and --tls-key belong together: give both or neither")
	}
	if s.PlainText && s.wantsTLS() {
		return errors.New("--insecure is plain text, and excludes --tls, --tls-ca, --tls-cert and --tls-server-name")
	}
	return nil
}

func (s *tlsSettings) wantsTLS() bool {
	return s.TLS || s.CA != "" || s.Cert != "" || s.ServerName != ""
}

// absolute makes file names independent of the directory in which kvctl runs.
func (s *tlsSettings) absolute() error {
	for _, name := range []*string{&s.CA, &s.Cert, &s.Key, &s.TokenFile} {
		if *name == "" {
			continue
		}
		whole, err := filepath.Abs(*name)
		if err != nil {
			return err
		}
		*name = whole
	}
	return nil
}

// speaksTLS says whether connections are over TLS: unless told otherwise, off loopback.
func (a *app) speaksTLS() bool {
	if a.tls.wantsTLS() || a.tls.PlainText {
		return a.tls.wantsTLS()
	}
	host, _, _ := net.SplitHostPort(a.endpoint)
	ip := net.ParseIP(host)
	return host != "localhost" && (ip == nil || !ip.IsLoopback())
}

// options are those of the client.
func (s *tlsSettings) options() (options []client.Option) {
	switch {
	case s.wantsTLS():
		options = append(options, client.WithTLSFiles(client.TLSFiles{CA: s.CA, Cert: s.Cert, Key: s.Key, ServerName: s.ServerName}))
	case s.PlainText:
		options = append(options, client.WithPlainText())
	}
	switch {
	case s.TokenFile != "":
		options = append(options, client.WithTokenFile(s.TokenFile))
	case s.Token != "":
		options = append(options, client.WithToken(s.Token))
	}
	return options
}

// chooseServer finds endpoint and settings: flags, then a context that is named, then the environment,
// then the current context. An endpoint that was given without a context does not get the settings of
// the current one, which are for another server.
func (a *app) chooseServer(cmd *cobra.Command) error {
	name, endpoint := a.context, a.endpoint
	if name == "" {
		name = a.getenv(contextEnv)
	}
	if endpoint == "" {
		endpoint = a.getenv(endpointEnv)
	}
	var chosen serverContext
	if isAboutContexts(cmd) {
		name = ""
	} else if name != "" || endpoint == "" {
		file, err := a.readContexts()
		if err != nil {
			return err
		}
		if chosen, err = file.find(name); err != nil {
			return err
		}
		if chosen.Endpoint != "" {
			a.chosen = cmp.Or(name, file.Current)
		}
	}
	if name != "" && a.endpoint == "" { // a context that was named is before the environment
		endpoint = chosen.Endpoint
	}
	for _, next := range []string{endpoint, chosen.Endpoint, endpointDefault} {
		if a.endpoint == "" {
			a.endpoint = next
		}
	}
	return a.tls.adopt(cmd, a.getenv, &chosen)
}

// isAboutContexts reports whether a command must work with contexts that cannot be used.
func isAboutContexts(cmd *cobra.Command) bool {
	for ; cmd != nil; cmd = cmd.Parent() {
		switch cmd.Name() {
		case "context", "completion", "version":
			return true
		}
	}
	return false
}
