package main

import (
	"bytes"
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/certs"
	"github.com/epochkv/epochkv/internal/config"
)

// runWith runs one command line in an environment, and returns standard output, standard error and
// the exit code.
func runWith(t *testing.T, env map[string]string, args ...string) (string, string, int) {
	t.Helper()
	var out, errs bytes.Buffer
	a := &app{in: strings.NewReader(""), out: &out, err: &errs, getenv: func(name string) string { return env[name] }}
	code := a.run(t.Context(), args)
	return out.String(), errs.String(), code
}

// trial is a server with the certificates of kvctl tls init.
func trial(t *testing.T, adjust ...func(*config.Config)) (endpoint, dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "tls")
	out, errs, code := runWith(t, nil, "tls", "init", dir)
	if code != 0 {
		t.Fatalf("exit %d: %s", code, errs)
	}
	// The printed command is one that kvserver accepts.
	_, command, _ := strings.Cut(out, "kvserver ")
	command, _, _ = strings.Cut(command, "\n")
	in, err := config.Load(append(strings.Fields(command), "--listen=0.0.0.0:7400"), nil)
	if err != nil {
		t.Fatal(err)
	}
	use := func(c *config.Config) { c.TLS = in.Config.TLS }
	return startReal(t, append([]func(*config.Config){use}, adjust...)...), dir
}

func trialFlags(dir string) []string {
	return []string{"--tls-ca", filepath.Join(dir, fileCA), "--tls-cert", filepath.Join(dir, fileClient), "--tls-key", filepath.Join(dir, fileClientKey)}
}

// TestTrialCertificatesServeATrial: what kvctl tls init makes is enough for mutual TLS; keys are for
// their owner alone, and a second run overwrites nothing.
func TestTrialCertificatesServeATrial(t *testing.T) {
	endpoint, dir := trial(t)
	on := append(trialFlags(dir), "--endpoint", endpoint)
	if _, errs, code := runWith(t, nil, append(on, "put", "k", "v")...); code != 0 {
		t.Fatalf("exit %d: %s", code, errs)
	}
	if out, errs, code := runWith(t, nil, append(on, "tls", "reload", "-o", "jsonl")...); code != 0 || !strings.Contains(out, `"changed":false`) || !strings.Contains(out, "CN=kvserver") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	for _, name := range []string{fileCAKey, fileServerKey, fileClientKey} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	before, err := os.ReadFile(filepath.Join(dir, fileServer))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, fileCA)); err != nil { // even if the first file is missing
		t.Fatal(err)
	}
	if _, errs, code := runWith(t, nil, "tls", "init", dir); code != exitError || !strings.Contains(errs, "is not overwritten") {
		t.Errorf("exit %d: %s", code, errs)
	}
	if after, err := os.ReadFile(filepath.Join(dir, fileServer)); err != nil || !bytes.Equal(before, after) {
		t.Error("a file was overwritten")
	}
	if _, err := os.Stat(filepath.Join(dir, fileCA)); err == nil {
		t.Error("a part of the files was written anew")
	}
}

// TestTLSProblemsSayWhatToDo: each way to connect wrongly ends with exit code 6 and advice that names
// the option.
func TestTLSProblemsSayWhatToDo(t *testing.T) {
	endpoint, dir := trial(t)
	_, other := trial(t)
	plain := startReal(t)
	in := func(of, name string) string { return filepath.Join(of, name) }
	flags := func(of, ca string, more ...string) []string {
		return append([]string{"--tls-ca", in(ca, fileCA), "--tls-cert", in(of, fileClient), "--tls-key", in(of, fileClientKey)}, more...)
	}
	expired := expiredServer(t)
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"plain text to a TLS port":   {[]string{"--endpoint", endpoint}, "--tls-ca"},
		"TLS to a plain text port":   {append(trialFlags(dir), "--endpoint", plain), "--insecure"},
		"no authority":               {[]string{"--tls", "--endpoint", endpoint}, "--tls-ca"},
		"another authority":          {flags(dir, other, "--endpoint", endpoint), "--tls-ca"},
		"no client certificate":      {[]string{"--tls-ca", in(dir, fileCA), "--endpoint", endpoint}, "--tls-cert"},
		"another authority's client": {flags(other, dir, "--endpoint", endpoint), "--tls-client-ca"},
		"another name":               {flags(dir, dir, "--tls-server-name", "db1.example", "--endpoint", endpoint), "--tls-server-name"},
		"expired":                    {expired, "has expired"},
	} {
		_, errs, code := runWith(t, nil, append(c.args, "get", "k")...)
		if code != exitUnavailable || !strings.Contains(errs, "The connection failed") || !strings.Contains(errs, c.want) {
			t.Errorf("%s: exit %d: %s", name, code, errs)
		}
	}
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"a key without its certificate": {[]string{"--tls-key", in(dir, fileClientKey)}, "belong together"},
		"a missing file":                {[]string{"--tls-ca", in(dir, "nothing.crt")}, "nothing.crt"},
		"the key of another":            {[]string{"--tls-cert", in(dir, fileClient), "--tls-key", in(other, fileClientKey)}, "does not match"},
		"plain text and TLS":            {[]string{"--insecure", "--tls"}, "excludes"},
	} {
		if _, errs, code := runWith(t, nil, append(c.args, "get", "k")...); code == 0 || code == exitUnavailable || !strings.Contains(errs, c.want) {
			t.Errorf("%s: exit %d: %s", name, code, errs)
		}
	}
}

// expiredServer listens with a certificate that has expired, with which no kvserver starts, and returns
// the flags of a client of it.
func expiredServer(t *testing.T) []string {
	t.Helper()
	now := time.Now()
	authority, err := certs.NewAuthority(certs.Subject{Name: "ca", NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	issued, err := authority.Issue(certs.Subject{Name: "server", Hosts: []string{"127.0.0.1"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(-time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(issued.Cert, issued.Key)
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(t.TempDir(), fileCA)
	if err := os.WriteFile(ca, authority.PEM().Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).Handshake() //nolint:forcetypeassert // of tls.Listen
			_ = conn.Close()
		}
	}()
	return []string{"--tls-ca", ca, "--endpoint", listener.Addr().String()}
}

// TestContextsKeepHowToConnect: a context has endpoint and files, flags come first, the environment changes nothing in it,
// and an endpoint that is given alone does not get the settings of the current context.
func TestContextsKeepHowToConnect(t *testing.T) {
	endpoint, dir := trial(t)
	plain := startReal(t)
	file := filepath.Join(t.TempDir(), "sub", "contexts.json")
	env := map[string]string{contextsEnv: file}
	want := func(code int, text string, args ...string) {
		t.Helper()
		out, errs, got := runWith(t, env, args...)
		if got != code || !strings.Contains(out+errs, text) {
			t.Errorf("%v: exit %d, want %d and %q: %s%s", args, got, code, text, out, errs)
		}
	}
	want(0, "", append(trialFlags(dir), "context", "add", "prod", "--endpoint", endpoint)...)
	want(0, "", "context", "add", "local", "--endpoint", plain)
	want(exitUsage, "exists already", "context", "add", "prod")
	want(0, `"name":"prod","current":true`, "context", "list")
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	want(0, "", "put", "k", "secure") // prod is current
	want(0, "secure", "get", "k")
	want(0, "", "--context", "local", "put", "k", "plain")
	want(0, "plain", "--endpoint", plain, "get", "k") // without the files of prod
	want(0, "secure", "--context", "prod", "--endpoint", endpoint, "get", "k")
	env[contextEnv] = "local"
	want(0, "plain", "get", "k")
	delete(env, contextEnv)
	want(0, "", "context", "use", "local")
	want(0, "plain", "get", "k")
	env["KVCTL_TLS_CA"] = filepath.Join(dir, "nothing.crt")
	want(exitError, "nothing.crt", "--endpoint", endpoint, "get", "k")
	want(0, "plain", "--context", "local", "get", "k")
	delete(env, "KVCTL_TLS_CA")
	env["KVCTL_INSECURE"] = "true"
	want(0, "secure", "--context", "prod", "get", "k")
	delete(env, "KVCTL_INSECURE")
	env["KVCTL_TOKEN"] = "epochkv_of_another_server"
	want(0, "", "context", "add", "without", "--endpoint", plain)
	delete(env, "KVCTL_TOKEN")
	if text, err := os.ReadFile(file); err != nil || strings.Contains(string(text), "epochkv_") {
		t.Errorf("a context has the token of the environment, which is for another server: %s, %v", text, err)
	}
	want(0, "", "context", "remove", "without")
	want(exitUsage, "no context", "--context", "nowhere", "get", "k")
	want(0, "", "context", "remove", "local")
	want(exitError, "no context", "context", "use", "local")
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	want(exitUsage, "chmod 600", "get", "k")
}

// TestManifestUsesTheFilesOfATrial: the Kubernetes manifest names the files that kvctl tls init makes and the
// variables that kvctl reads, and its secret does not have the key of the authority.
func TestManifestUsesTheFilesOfATrial(t *testing.T) {
	manifest, err := os.ReadFile("../../deploy/kubernetes/epochkv.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text := string(manifest)
	for _, name := range []string{fileCA, fileServer, fileServerKey, fileClient, fileClientKey} {
		if !strings.Contains(text, "/tls/"+name) || !strings.Contains(text, "--from-file=tls/"+name) {
			t.Errorf("%s is not used, or not in the secret", name)
		}
	}
	if strings.Contains(text, "--from-file=tls/"+fileCAKey) || strings.Contains(text, "--from-file=tls\n") {
		t.Errorf("the secret has %s", fileCAKey)
	}
	var known tlsSettings
	for _, s := range known.all()[2:5] {
		if !strings.Contains(text, "{name: "+s.env+", value: /tls/") {
			t.Errorf("%s is not set", s.env)
		}
	}
}
