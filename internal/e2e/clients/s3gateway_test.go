package clients

import (
	"bytes"
	"flag"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

var s3GatewayFlag = flag.String("s3.gateway", "", "the program versitygw, a server of the S3 protocol, with which backup, archive and restore are tested (make test-s3)")

const (
	gatewayUser   = "epochkv"
	gatewaySecret = "not much of a secret"
	gatewayBucket = "backups"
)

// gateway is a server of the S3 protocol that others have made. Its buckets are directories, and its objects files.
type gateway struct {
	t       *testing.T
	address string
	root    string // has the buckets
	tls     string // has the certificates; empty without TLS
	process *exec.Cmd
	log     bytes.Buffer
}

// startGateway runs a server with one bucket until the test ends. Without the program the test is left out: it comes from a package
// index, and `make test-s3` gets it from there.
func startGateway(t *testing.T, withTLS bool) *gateway {
	t.Helper()
	if *s3GatewayFlag == "" {
		t.Skip("needs a server of the S3 protocol: see make test-s3")
	}
	g := &gateway{t: t, address: freeAddress(t), root: t.TempDir()}
	if withTLS {
		g.tls = filepath.Join(t.TempDir(), "tls")
		if out, err := exec.Command(filepath.Join(bin, "kvctl"), "tls", "init", g.tls).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	if err := os.Mkdir(filepath.Join(g.root, gatewayBucket), 0o700); err != nil {
		t.Fatal(err)
	}
	g.start()
	t.Cleanup(func() {
		g.kill()
		if t.Failed() {
			t.Logf("the log of the S3 server:\n%s", g.log.String())
		}
	})
	return g
}

func (g *gateway) start() {
	g.t.Helper()
	args := []string{"--port", g.address, "--quiet"}
	if g.tls != "" {
		args = append(args, "--cert", filepath.Join(g.tls, "server.crt"), "--key", filepath.Join(g.tls, "server.key"))
	}
	g.process = exec.Command(*s3GatewayFlag, append(args, "posix", g.root)...)
	g.process.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+gatewayUser, "ROOT_SECRET_KEY="+gatewaySecret)
	g.process.Stdout, g.process.Stderr = &g.log, &g.log
	if err := g.process.Start(); err != nil {
		g.t.Fatal(err)
	}
	for deadline := time.Now().Add(startMax); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if conn, err := net.Dial("tcp", g.address); err == nil {
			_ = conn.Close()
			return
		}
	}
	g.t.Fatalf("the S3 server did not start:\n%s", g.log.String())
}

// kill ends the server in the middle of what it does. What it has stored stays.
func (g *gateway) kill() {
	if g.process.ProcessState == nil {
		_ = g.process.Process.Kill() // it may be gone already, which Wait finds out
		_ = g.process.Wait()
	}
}

func (g *gateway) signal(signal syscall.Signal) {
	g.t.Helper()
	if err := g.process.Process.Signal(signal); err != nil {
		g.t.Fatal(err)
	}
}

// environment is what the programs of AWS take from it, too.
func (g *gateway) environment(more ...string) []string {
	env := []string{
		"AWS_ENDPOINT_URL_S3=http://" + g.address, "AWS_ACCESS_KEY_ID=" + gatewayUser, "AWS_SECRET_ACCESS_KEY=" + gatewaySecret,
		"AWS_SHARED_CREDENTIALS_FILE=" + filepath.Join(g.root, "no such file"), "AWS_REGION=us-east-1", "AWS_CA_BUNDLE=",
	}
	if g.tls != "" {
		env = append(env, "AWS_ENDPOINT_URL_S3=https://"+g.address, "AWS_CA_BUNDLE="+filepath.Join(g.tls, "ca.crt"))
	}
	return append(env, more...)
}

// server starts a kvserver that reaches the gateway.
func (g *gateway) server(args ...string) *server {
	g.t.Helper()
	s := &server{t: g.t, dir: g.t.TempDir(), endpoint: freeAddress(g.t), args: args, env: g.environment()}
	s.run()
	return s
}

// objects are the objects of the bucket whose names contain a part, with the times when they were created.
func (g *gateway) objects(part string) map[string]time.Time {
	g.t.Helper()
	found := map[string]time.Time{}
	root := filepath.Join(g.root, gatewayBucket)
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.Contains(name, part) {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			found[strings.TrimPrefix(name, root)] = info.ModTime()
		}
		return err
	})
	if err != nil {
		g.t.Fatal(err)
	}
	return found
}
