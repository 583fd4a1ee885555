package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gomodule/redigo/redis"
)

// redisDefaultPort is where Redis listens by default.
const redisDefaultPort = "6379"

const (
	redisConnectTime = 5 * time.Second
	redisAnswerTime  = 30 * time.Second // for all answers of one round trip
	redisTries       = 4                // of a round trip whose connection is lost
)

// errRedisClosed ends an import from a Redis that closes each connection, as a proxy does whose Redis is down.
var errRedisClosed = errors.New("the Redis has closed the connection before all of its keys were read; import again")

// redisClient sends commands to one run of a Redis, over a new connection if the last one is lost. The cursor of SCAN is a place in the hash
// table of a run, which is another in each run and in each replica: with the cursor of another one, SCAN leaves keys out.
type redisClient struct {
	address string
	options []redis.DialOption

	open      redis.Conn // nil: there is none
	connected bool       // there was one
	run       string     // empty: the Redis does not tell
}

// redisCommand is the name of a command and its arguments.
type redisCommand []any

// newRedisClient takes redis://USER:PASSWORD@HOST:PORT/DATABASE, with all but the host left out or not.
func newRedisClient(u *url.URL) (*redisClient, error) {
	if u.Opaque != "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("expected redis://USER:PASSWORD@HOST:PORT/DATABASE and nothing else")
	}
	database := 0
	if path := strings.Trim(u.Path, "/"); path != "" {
		var err error
		if database, err = strconv.Atoi(path); err != nil || database < 0 {
			return nil, fmt.Errorf("%q is not the number of a database", path)
		}
	}
	password, _ := u.User.Password()
	if password == "" {
		password = os.Getenv("REDISCLI_AUTH") // as redis-cli has it
	}
	host := u.Hostname()
	if host == "" {
		host = "localhost"
	}
	return &redisClient{address: net.JoinHostPort(host, u.Port()), options: []redis.DialOption{
		redis.DialUsername(u.User.Username()), redis.DialPassword(password), redis.DialDatabase(database), redis.DialUseTLS(u.Scheme == "rediss"),
		redis.DialConnectTimeout(redisConnectTime), redis.DialReadTimeout(redisAnswerTime), redis.DialWriteTimeout(redisAnswerTime),
	}}, nil
}

// do sends commands in one round trip. An answer may be an error of the Redis, which the functions of the library that read answers return.
// The commands only read: those whose answers are lost are sent again.
func (c *redisClient) do(ctx context.Context, commands ...redisCommand) (answers []any, err error) {
	if len(commands) == 0 {
		return nil, nil
	}
	for try := 1; ; try++ {
		if answers, err = c.once(ctx, commands); err == nil {
			return answers, nil
		}
		c.close()
		if !c.connected || try == redisTries || ctx.Err() != nil || !isConnectionLost(err) {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(try) * 100 * time.Millisecond):
		}
	}
	if isClosed(err) {
		err = errRedisClosed // io.EOF would be the end of the records
	}
	return nil, err
}

func (c *redisClient) once(ctx context.Context, commands []redisCommand) ([]any, error) {
	if c.open == nil {
		if err := c.connect(ctx); err != nil {
			return nil, err
		}
	}
	for _, command := range commands {
		if err := c.open.Send(command[0].(string), command[1:]...); err != nil {
			return nil, err
		}
	}
	return redis.Values(redis.DoContext(c.open, ctx, "")) // sends them, and returns all answers
}

// connect makes a connection. A later one has to reach the same run.
func (c *redisClient) connect(ctx context.Context) (err error) {
	if c.open, err = redis.DialContext(ctx, "tcp", c.address, c.options...); err != nil {
		c.open = nil
		return err
	}
	info, err := redis.String(redis.DoContext(c.open, ctx, "INFO", "server"))
	if _, refused := errors.AsType[redis.Error](err); err != nil && !refused {
		return err
	}
	run := runID(info)
	switch {
	case !c.connected:
		c.connected, c.run = true, run
	case run == "":
		return errors.New("the connection to the Redis was lost, and it does not tell (INFO server) whether it was restarted, so keys might be left out; import again")
	case c.run != run:
		return errors.New("the Redis was restarted, or another one has taken its place, so keys might be left out; import again")
	}
	return nil
}

// close ends the connection, of which nothing is awaited.
func (c *redisClient) close() {
	if c.open != nil {
		_ = c.open.Close()
		c.open = nil
	}
}

// isConnectionLost tells what another connection may cure from what the Redis answers.
func isConnectionLost(err error) bool {
	_, network := errors.AsType[net.Error](err)
	return network || isClosed(err)
}

func isClosed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// runID finds the name of the run in an answer to INFO, or nothing.
func runID(info string) string {
	for line := range strings.Lines(info) {
		if id, ok := strings.CutPrefix(line, "run_id:"); ok {
			return strings.TrimSpace(id)
		}
	}
	return ""
}
