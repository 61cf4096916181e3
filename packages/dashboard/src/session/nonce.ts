/** The nonce that the server gave this page for styles: its policy allows no others. */
export const styleNonce = (): string => {
  const meta = document.querySelector<HTMLMetaElement>('meta[name="style-nonce"]');
  return meta?.content || meta?.nonce || '';
};
