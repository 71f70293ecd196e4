package harness

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// TLSFiles names the files of a certificate authority, a server's certificate for
// localhost and 127.0.0.1, and a client's for the common name ClientName.
type TLSFiles struct {
	CA, Cert, Key         string
	ClientCert, ClientKey string
}

// ClientName is the common name of client certificates.
const ClientName = "walrelay"

// NewTLSFiles makes new certificates in dir, valid for a day.
func NewTLSFiles(dir string) (*TLSFiles, error) {
	f := &TLSFiles{
		CA:         filepath.Join(dir, "ca.pem"),
		Cert:       filepath.Join(dir, "server.pem"),
		Key:        filepath.Join(dir, "server-key.pem"),
		ClientCert: filepath.Join(dir, "client.pem"),
		ClientKey:  filepath.Join(dir, "client-key.pem"),
	}
	if err := f.write(); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	return f, nil
}

func (f *TLSFiles) write() error {
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	ca := certificate(1, "walrelay test CA")
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign
	if err := sign(ca, ca, caKey, caKey, f.CA, ""); err != nil {
		return err
	}
	for i, leaf := range []struct{ name, cert, key string }{
		{"localhost", f.Cert, f.Key},
		{ClientName, f.ClientCert, f.ClientKey},
	} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return err
		}
		c := certificate(int64(i+2), leaf.name)
		c.KeyUsage = x509.KeyUsageDigitalSignature
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
		c.DNSNames = []string{leaf.name}
		c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
		if err := sign(c, ca, key, caKey, leaf.cert, leaf.key); err != nil {
			return err
		}
	}
	return nil
}

func certificate(serial int64, name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
}

func sign(c, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey, certFile, keyFile string) error {
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, parentKey)
	if err != nil {
		return err
	}
	b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(certFile, b, 0o644); err != nil || keyFile == "" {
		return err
	}
	if der, err = x509.MarshalPKCS8PrivateKey(key); err != nil {
		return err
	}
	return os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}
